"""Makes the repository's own Python tools importable: tools/sim and tools/capture."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tools/sim", "tools/capture"):
    sys.path.insert(0, str(ROOT / folder))
