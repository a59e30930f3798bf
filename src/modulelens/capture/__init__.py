"""Live model -> Trace. Never writes to disk, never changes what the step computes."""

from modulelens.capture.capture import Capture
from modulelens.capture.init import track_init
from modulelens.capture.keep import Keep
from modulelens.capture.trace import Trace, end_traces, trace

__all__ = ["Capture", "Keep", "Trace", "end_traces", "trace", "track_init"]
