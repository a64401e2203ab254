"""Flags of commands that measure many requests: which come, how many, when."""

from typing import Annotated

import typer

from edgellm.cli._options import positive

Scenario = Annotated[
    str, typer.Option("--scenario", help="Which requests come; `list` says what there is.")
]
Requests = Annotated[
    int | None,
    typer.Option("--requests", min=1, show_default=False,
                 help="How many; else what takes about a minute."),
]  # fmt: skip
Rate = Annotated[
    float | None,
    typer.Option("--rate", callback=positive, show_default=False,
                 help="Requests/s, or inf: all at once; else 70 % of what can be done."),
]  # fmt: skip
Seed = Annotated[int, typer.Option("--seed", "-s", min=0, help="Of lengths and arrivals.")]
