import sys
from pathlib import Path

# tools/ is not part of the installed distribution: its tests read it from the checkout.
sys.path.insert(0, str(Path(__file__).parents[2]))
