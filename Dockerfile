# zeropage with the torch that pip finds. Elsewhere: an image that has torch, and the last three instructions.
#
#   docker build -t zeropage .
#   docker run --rm -v /fast/disk:/var/tmp --security-opt seccomp=unconfined zeropage doctor /var/tmp
#
# Docker's own seccomp profile forbids io_uring; with it, threads are used.
FROM python:3.11-slim-bookworm
RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential cmake ninja-build liburing-dev \
 && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0
COPY . /zeropage
RUN pip install --no-cache-dir scikit-build-core && pip install --no-cache-dir --no-build-isolation /zeropage
ENTRYPOINT ["zeropage"]
