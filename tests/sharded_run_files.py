"""Run files of small sharded runs that train as processes."""

_DATA = """
[model]
architecture = "gpt"
vocab = 16
block = 8
layers = 2
heads = 2
width = {width}
[data]
kind = "synthetic"
seed = 1
rows = 500
held_out_rows = 4
block = 8
vocab = 16
[inner]
batch = 7
lr = 1e-3
"""


def run_file(name: str, tables: str, *, width: int = 32, top: str = "", inner: str = "") -> str:
    """A run called `name` with these `tables`; `top` and `inner` add lines to what all have."""
    first = f'name = "{name}"\nstrategy = "sharded"\nseed = 3\n{top}'
    return f"{first}{_DATA.format(width=width)}{inner}{tables}"
