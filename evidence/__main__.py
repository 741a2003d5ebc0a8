"""`python -m evidence`: does the pieces of all studies that were not done yet."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from evidence.studies import STUDIES
from evidence.work import RESULTS, Store, to_do, work_off


def main(words: Sequence[str] | None = None) -> int:
    """Go on where the last call ended.

    Returns:
        The exit status: 1 where a piece failed, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread")
    parser.add_argument("--only", nargs="+", default=(), metavar="WORD", help="pieces with these arguments")
    parser.add_argument("--smoke", action="store_true", help="tiny pieces, whose results are thrown away")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args(words)
    if unknown := set(options.studies) - set(STUDIES):
        parser.error(f"there is no study {', '.join(unknown)}: choose of {', '.join(STUDIES)}")
    chosen = [STUDIES[name] for name in options.studies or STUDIES]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(options.out or (Path(folder) if options.smoke else RESULTS))
        try:
            waiting = to_do(chosen, store, smoke=options.smoke, only=options.only)
            timed = [piece for piece in waiting if piece[0].is_timed]
            failed = work_off([piece for piece in waiting if piece not in timed], store, options.jobs, _say)
            failed += work_off(timed, store, 1, _say)
        except KeyboardInterrupt:
            _say("stopped; the pieces that were done are kept, and the same command goes on")
            return 130
    return 1 if failed else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
