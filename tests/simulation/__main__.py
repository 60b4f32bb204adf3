"""`python -m tests.simulation --seeds N [--first M]` runs many seeds and counts the faults; every fourth is of hosts.

`python -m tests.simulation SUITE SEED...` replays seeds of a suite (`suites.py`).
"""

import argparse
import json
import sys
import time
import traceback
from collections import Counter

from tests.simulation.suites import SUITES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="?", choices=SUITES)
    parser.add_argument("replayed", nargs="*", type=int)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the counts of faults and nothing else")
    args = parser.parse_args()
    if args.suite is not None:
        for seed in args.replayed:
            print(seed, dict(SUITES[args.suite].run_seed(seed)))
        return
    seeds = range(args.first, args.first + args.seeds)
    faults: Counter[str] = Counter()
    failed: list[int] = []
    began = time.perf_counter()
    for seed in seeds:
        try:
            faults += SUITES["hosts" if seed % 4 == 3 else "scenario"].run_seed(seed)
        except Exception:  # noqa: BLE001 - the next seed is run whatever this one does
            failed.append(seed)
            traceback.print_exc()
    if args.json:
        print(json.dumps(faults))
    else:
        print(f"{len(seeds)} seeds in {time.perf_counter() - began:.1f} s; {dict(faults)}; failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
