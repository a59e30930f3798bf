"""Where time, FLOPs and memory of a module go, as text."""

from __future__ import annotations

from modulelens.records import OpRow, Profile
from modulelens.report.quantity import count, duration, plural, size
from modulelens.report.table import clean, indent, pairs, table


def profile_report(profile: Profile, *, name: str, limit: int = 15) -> str:
    """Totals, then the operators by self time; operators without a FLOP formula are named."""
    totals = pairs(
        [
            ("forward", _pass(profile.forward_s, profile.flops_forward)),
            ("backward", _backward(profile)),
            ("unknown", _unknown(profile)),
            ("parameters", f"{count(profile.params)} ({size(profile.param_bytes)})"),
            ("buffers", size(profile.buffer_bytes)),
            ("in, out", f"{size(profile.input_bytes)}, {size(profile.output_bytes)}"),
            ("saved", f"{size(profile.saved_bytes)} of activations kept for backward"),
            ("peak", "" if profile.peak_bytes is None else size(profile.peak_bytes)),
            ("trace", profile.trace_file),
        ]
    )
    inputs = ", synthesised inputs" if profile.synthesized else ""
    threads = plural(profile.num_threads, "thread")
    lines = [f"{clean(name)} on {profile.device}, {threads}{inputs}", indent(totals)]
    if profile.ops:
        lines.append(_operators(profile, limit))
    return "\n".join(lines + [f"note: {clean(text)}" for text in profile.notes])


def _pass(seconds: float, flops: int) -> str:
    rate = f", {count(flops / seconds)}FLOP/s" if seconds > 0 and flops else ""
    return f"{duration(seconds)}, {count(flops)} FLOPs{rate}"


def _backward(profile: Profile) -> str:
    if profile.backward_s is None:
        return "not run"
    return _pass(profile.backward_s, profile.flops_backward)


def _unknown(profile: Profile) -> str:
    names = ", ".join(f"{op} x{calls}" for op, calls in profile.flops_unknown.items())
    return f"FLOPs of {names}; the sums leave them out" if names else ""


def _operators(profile: Profile, limit: int) -> str:
    ops = sorted(profile.ops, key=lambda op: op.self_s, reverse=True)
    whole = sum(op.self_s for op in ops) or 1.0
    header = ("OPERATOR", "PASS", "CALLS", "SELF TIME", "SHARE", "FLOPS")
    rows = [
        (
            op.name,
            "backward" if op.backward else "forward",
            str(op.calls),
            duration(op.self_s),
            f"{op.self_s / whole:.1%}",
            _flops(op),
        )
        for op in ops[:limit]
    ]
    text = table(header, rows, right=(2, 3, 4, 5))
    if len(ops) <= limit:
        return text
    rest = sum(op.self_s for op in ops[limit:])
    return (
        f"{text}\n... {len(ops)} operators in all, {duration(rest)} in the rest; --limit shows more"
    )


def _flops(op: OpRow) -> str:
    return "UNKNOWN" if op.flops is None else count(op.flops)
