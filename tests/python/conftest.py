"""Makes the repository's own Python tools importable: tools/sim and tools/capture."""

import os
import sys
from pathlib import Path

# torch brings an OpenMP runtime of its own. Where both runtimes' idle threads spin for work, they
# take the cores from each other and the tests take twice as long. Read when a runtime is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tools/sim", "tools/capture"):
    sys.path.insert(0, str(ROOT / folder))
