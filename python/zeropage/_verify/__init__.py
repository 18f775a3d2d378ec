"""`zeropage verify`: a script run plain and paged, and compared to the bit.

`comparison` and `runs` belong to the parent process. The other modules belong to the processes that run the script.
[Note: the plain process] These load this package under another name and import each other relatively, because
`import zeropage` patches torch, and the reference must be PyTorch as it is.
"""
