"""Run a benchmark with transformers' own attention: python experiments/without_short.py benchmarks/step_time.py ..."""

import runpy
import sys

from megabatch.models import text_attention

text_attention.use_short_attention = lambda *_: None
sys.argv = sys.argv[1:]
sys.path.insert(0, "benchmarks")
runpy.run_path(sys.argv[0], run_name="__main__")
