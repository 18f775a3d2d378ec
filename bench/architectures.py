"""Train toys of transformers' language models plain and paged. Are the loss and each parameter equal to the bit?

Activations are on disk, huge operators run in tiles, and everything is paged out after each statement. Models that
cannot be this small, or that plain PyTorch cannot train from token ids and labels alone, are counted separately.
"""

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections import Counter

import torch
import transformers
from _common import finish
from tqdm import tqdm
from transformers.models.auto import modeling_auto

import zeropage

os.environ.setdefault("ZEROPAGE_POISON", "1")  # new frames hold signalling NaN until they are read or written

SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "embedding_size": 32, "word_embed_proj_dim": 32, "dim": 32,
    "intermediate_size": 64, "ffn_dim": 64, "n_inner": 64, "d_ff": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "ffn_hidden_size": 64,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "n_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "encoder_attention_heads": 4, "n_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "kv_channels": 8, "d_kv": 8,
    "vocab_size": 512, "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "sliding_window": 16,
    "num_buckets": 16, "attention_window": 8, "state_size": 8, "rank": 8, "attention_hidden_size": 32,
}  # fmt: skip


def small_config(kind: type) -> transformers.PretrainedConfig:
    default = kind()
    known = {name: value for name, value in SMALL.items() if getattr(default, name, None) is not None}
    config = kind(**known)
    for dropout in [name for name in vars(config) if "dropout" in name or "pdrop" in name]:
        with contextlib.suppress(Exception):
            setattr(config, dropout, 0.0)
    return config


def losses_of(model: torch.nn.Module, evict: bool) -> list[float]:
    tokens = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(3))
    between = zeropage.page_out if evict else lambda model: None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        loss = model(input_ids=tokens, labels=tokens).loss
        between(model)
        loss.backward()
        between(model)
        optimizer.step()
        between(model)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(name: str, tiling: bool, answer: "multiprocessing.connection.Connection") -> None:
    """Compare in a process of its own, which the caller may kill."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    kind = getattr(transformers, name)
    try:
        config_kind = kind.config_class
        with torch.device("meta"):
            if sum(p.numel() for p in kind(small_config(config_kind)).parameters()) > 20_000_000:
                return answer.send(("too large", ""))
        torch.manual_seed(0)
        plain = kind(small_config(config_kind)).train()
        expected = losses_of(plain, False)
    except Exception as error:
        return answer.send(("not trained by plain PyTorch so", f"{type(error).__name__}: {error}"))
    try:
        homes = dict.fromkeys(["parameters", "gradients", "optimizer", "activations"], "disk")
        with tempfile.TemporaryDirectory(dir="build", prefix="swap-") as directory:
            torch.manual_seed(0)
            memory = {"device_memory": "64MB", "host_memory": "16MB", "min_page_bytes": 1, "page_size": "16KiB"}
            tiles = {"tiling": "exact", "tile_above": "32KB"} if tiling else {"tiling": "off"}
            with zeropage.init(device="cpu", disk_path=directory, **homes, **memory, **tiles):
                paged = kind(small_config(config_kind)).train()
            losses = losses_of(paged, True)
            same = all(
                torch.equal(a, b)
                for a, b in zip(plain.state_dict().values(), paged.state_dict().values(), strict=True)
            )
            answer.send(("equal" if same and losses == expected else "NOT EQUAL", f"{losses} {expected}"))
    except Exception:
        answer.send(("ERROR", traceback.format_exc()[-1500:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="classes of transformers")
    parser.add_argument("--no-tiling", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=120, help="for one of them")
    args = parser.parse_args()
    mappings = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES]
    mappings += [modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES]
    names = sorted({name for mapping in mappings for name in mapping.values() if isinstance(name, str)})
    counts: Counter[str] = Counter()
    context = multiprocessing.get_context("fork")

    def result_of(name: str) -> tuple[str, str, str]:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=compare, args=(name, not args.no_tiling, theirs))
        process.start()
        theirs.close()
        try:
            kind, text = ours.recv() if ours.poll(args.seconds) else ("too slow", "")
        except EOFError:
            kind, text = "ERROR", "the process died"
        if kind == "too slow":
            process.kill()
        process.join()
        return name, kind, text

    wanted = args.only or names
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for name, kind, text in tqdm(pool.map(result_of, wanted), total=len(wanted), disable=None):
            counts[kind] += 1
            if kind not in ("equal", "too large") and (args.only or "not trained" not in kind):
                tqdm.write(f"{name}: {kind}: {text}")
    finish([[kind, count] for kind, count in counts.most_common()], ["result", "architectures"], **counts)


if __name__ == "__main__":
    main()
