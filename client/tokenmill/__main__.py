"""The `tokenmill` command. The SDK works without click and rich; only this needs them."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from .cli.app import tokenmill

        tokenmill(prog_name="tokenmill")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"click", "rich"}:
            raise
        sys.stderr.write("tokenmill: the command line needs: pip install 'tokenmill[cli]'\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
