"""A stream that nobody holds any more is closed by the garbage collector, wherever that runs."""

from pathlib import Path

from tests.forked import run_program
from tests.tiny_adapters import make_adapter
from tests.tiny_models import save_tiny

_COLLECT = """
import gc, sys
from headstart import LLM, SamplingParams
from headstart.engine.driver import _Order
from tests.interruptions import Interruption

model, adapter = sys.argv[1:]
greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
llm = LLM(model, num_blocks=64, num_threads=1)
store = llm.engine.adapters

def use_adapters():
    llm.load_adapter("mine", adapter)
    llm.generate([5, 6, 7], greedy, adapter="mine")
    store.named, store.find("mine")
    llm.unload_adapter("mine")

def abandoned():
    stream = llm.stream([8, 9], greedy)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    return cycle

class Collecting(Interruption):
    def line(self, frame, event, arg):
        if event == "line" and garbage:
            garbage.pop()
            llm._driver._post(_Order(lambda: store.forget_unnamed(()), lambda error: None))
            gc.collect()
        return super().line(frame, event, arg)

within = [sys.modules[kind.__module__] for kind in type(store).__mro__[:2]]  # and of names
garbage = []
with Collecting(-1, None, *within) as counted:
    use_adapters()
gc.collect()
gc.freeze()
garbage = [abandoned() for _ in counted.lines]
with Collecting(-1, None, *within):
    use_adapters()
print("collected", len(counted.lines) - len(garbage), flush=True)
assert llm.reset_prefix_cache()
llm.close()
"""


def test_a_stream_is_collected_while_its_thread_is_among_the_adapters(tmp_path: Path) -> None:
    """The thread held the adapters' lock and waited for the engine, which waited for the lock."""
    model = save_tiny("llama", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", 0)
    done = run_program(_COLLECT, model, adapter)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 20
