"""edgellm pull: fetch models ahead of the first use."""

from typing import Annotated

import typer

from edgellm.cli._model import DownloadBar, complete
from edgellm.cli._output import say


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            show_default=False,
            autocompletion=complete,
            help="Short names of the catalogue, user/repo[:QUANT] on Hugging Face, or URLs. "
            "Default: the catalogue's default.",
        ),
    ] = None,
) -> None:
    """Fetch models, or newer versions of them; prints the path of each file.

    A fetch that was cut goes on where it stopped. Hugging Face is asked as HF_TOKEN, HF_ENDPOINT,
    HF_HUB_CACHE and HF_HUB_OFFLINE say.
    """
    from edgellm.hub import pull

    wanted: list[str | None] = [*names] if names else [None]
    for name in wanted:
        bar = DownloadBar()
        try:
            path = pull(name, bar)
        except KeyboardInterrupt:
            bar.close()
            say("Interrupted; the same command goes on where it stopped.")
            raise
        finally:
            bar.close()
        print(path)
