"""Lets the tests import the scripts of dev/ and dev/data/."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "dev" / "data")]
