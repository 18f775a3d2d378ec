from zeropage._cli import main

main(prog_name="zeropage")
