"""Writes checkpoints of 4 bits whose weights are rounded by what a text gives them for inputs.

`quantize.py` goes through the layers; `rounding.py` is GPTQ, `units.py` AWQ's scales, `inputs.py`
what a layer sees, `text.py` what is read, `folder.py` the files.
"""

from headstart.models.gptq.quantize import Plan, Written, check_target, plan_quantizing, quantize

__all__ = ["Plan", "Written", "check_target", "plan_quantizing", "quantize"]
