"""watched/ breaks jobs with what tests/ breaks its programs with."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
