"""`cpuchat models synthetic`: models of random weights for speed measurements."""

from __future__ import annotations

from pathlib import Path

import click

from cpuchat.cli.options import file_option
from cpuchat.errors import CpuchatError, UsageError

_SYNTHETIC_EPILOG = """\b
Examples:
  cpuchat models synthetic 1.5b m.gguf --quant Q4_K_M
  cpuchat models synthetic 70b m.gguf --layers 4
  cpuchat models synthetic 1.5b t.gguf --pair-alpha 0.8 --draft-out d.gguf"""


@click.command(epilog=_SYNTHETIC_EPILOG)
@click.argument("shape")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--quant", default="Q8_0", show_default=True, metavar="TYPE", help="Quantization: Q4_K_M, F16, ...")
@click.option("--layers", type=click.IntRange(min=1), metavar="N", help="Number of layers; default: the shape's.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Random seed; the same seed writes the same file.",
)
@click.option(
    "--pair-alpha", type=float, metavar="X",
    help="Write a target and a draft model with acceptance rate X, 0 to 1.",
)  # fmt: skip
@file_option("--draft-out", help="Path of the pair's draft; default: OUT with `-draft` in its name.")
@click.option("--draft-shape", default="0.05b", show_default=True, metavar="SHAPE", help="Shape of the pair's draft.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def synthetic(
    shape: str,
    out: Path,
    quant: str,
    layers: int | None,
    seed: int,
    pair_alpha: float | None,
    draft_out: Path | None,
    draft_shape: str,
    force: bool,
) -> int:
    """Write a model with random weights, in the SHAPE of a real one, to OUT.

    SHAPE is tiny, 0.05b, 0.5b, 1.5b, 3b, 7b, 8b, 14b, 32b, 70b, 30b-a3b or 27b-gemma3. The model
    writes nonsense, but costs as much memory and computation as a real one.
    """
    from cpuchat.synthetic.model import write_model
    from cpuchat.synthetic.pair import write_pair

    if pair_alpha is None:
        if draft_out is not None:
            raise UsageError("--draft-out needs --pair-alpha.", "Add --pair-alpha.")
        targets = [out]
    else:
        draft_out = draft_out or out.with_name(f"{out.stem}-draft.gguf")
        targets = [out, draft_out]
        if out == draft_out:
            raise UsageError("Target and draft cannot be the same file.", "Give --draft-out another name.")
    for file in targets:
        if file.exists() and not force:
            raise UsageError(f"{file} exists.", "Choose another name, or add --force to overwrite it.")
    try:
        if pair_alpha is None:
            write_model(out, shape, quant, layers=layers, seed=seed)
        else:
            write_pair(
                out, draft_out, pair_alpha, target=shape, draft=draft_shape, quant=quant, layers=layers, seed=seed
            )
    except OSError as error:
        raise CpuchatError(f"Cannot write {error.filename or out}: {error.strerror}.") from None
    from cpuchat.telemetry.units import size

    for file in targets:
        click.echo(f"{file}  {size(file.stat().st_size)}")
    return 0
