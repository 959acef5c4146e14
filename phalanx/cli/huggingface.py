"""`phalanx checkpoint export-hf` and `import-hf`: from and to Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.train.weights.convert import export_run, import_config

_check = click.option("--check/--no-check", default=True, show_default=True, help="Compare with transformers.")


@click.command("export-hf")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@_check
def export_command(run: Path, folder: Path, dtype: str, check: bool) -> None:
    """Write the newest checkpoint of RUN as a new FOLDER that transformers loads."""
    export_run(run, folder, click.echo, dtype=dtype, check=check)


@click.command("import-hf")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("config", type=click.Path(path_type=Path))
@_check
def import_command(folder: Path, config: Path, check: bool) -> None:
    """Write CONFIG, a file for `phalanx train` that starts from the weights of the Hugging Face FOLDER."""
    import_config(folder, config, click.echo, check=check)
