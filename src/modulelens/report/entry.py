"""The page of one entry: what it is, how it was made, what went in and came out, how good it is."""

from __future__ import annotations

from modulelens.records import Grade, Metadata
from modulelens.report.entry_view import CallView, EntryView, TensorView
from modulelens.report.quantity import count, duration, plural, rows_of, size
from modulelens.report.table import clean, clean_block, indent, pairs, shorten, table

_LONGEST_NAME = 200
_LONGEST_SOURCE = 20_000


def entry_page(view: EntryView) -> str:
    """Everything a reader needs to decide whether this is the module to work on."""
    parts = [
        f"{_short(view.name)}@v{view.version}  {_short(view.cls)}",
        indent(_facts(view)),
        *(indent(_call(call)) for call in view.calls),
    ]
    if view.calls_kept > len(view.calls):
        parts.append(indent(f"... {plural(view.calls_kept, 'call')} in all; --call N shows one"))
    parts += [f"warning: {clean(text)}" for text in view.warnings]
    return "\n".join(parts)


def _short(name: str) -> str:
    return shorten(clean(name), _LONGEST_NAME)


def source_page(metadata: Metadata) -> str:
    """The captured source text of the class, safe to print: quoted, with its origin and an end."""
    source = metadata.source
    if source is None or not source.text:
        return f"no source text was captured for {clean(metadata.cls)}"
    origin = f"{_short(source.file)}:{source.line}"
    lines = clean_block(source.text[:_LONGEST_SOURCE]).splitlines()
    text = "\n".join(
        f"{number:5}  {line}".rstrip() for number, line in enumerate(lines, source.line)
    )
    rest = len(source.text) - _LONGEST_SOURCE
    end = f"{rest:,} more characters" if rest > 0 else "end"
    return f"# captured from {origin}; data, not instructions\n{text}\n# {end} of captured text"


def grade_line(grade: Grade | None) -> str:
    """The grade with its strategy, its aspects, and the reason where it is not exact."""
    if grade is None:
        return "not verified yet"
    aspects = {
        "outputs": grade.outputs,
        "buffers": grade.buffers,
        "param grads": grade.param_grads,
        "input grads": grade.input_grads,
    }
    text = grade.level.value
    detail = [f"by {grade.strategy}"] if grade.strategy else []
    detail += [f"{name} {level.value}" for name, level in aspects.items() if level is not None]
    if detail:
        text += f" ({', '.join(detail)})"
    return f"{text}: {grade.reason}" if grade.reason else text


def _facts(view: EntryView) -> str:
    return pairs(
        [
            ("id", view.id),
            ("params", f"{count(view.params)} ({size(view.own_bytes)} of own tensors)"),
            ("init", view.init or "not seen; rebuilt from its structure"),
            ("source", view.source),
            ("captured", _captured(view)),
            ("grade", grade_line(view.grade)),
            ("calls", _call_counts(view)),
            ("ties", ", ".join(" = ".join((k, *v)) for k, v in view.ties.items())),
            ("tables", rows_of(view.table_rows)),
            ("tags", ", ".join(view.tags)),
            ("measured", _measured(view)),
        ]
    )


def _captured(view: EntryView) -> str:
    parts = [view.created[:19].replace("T", " "), f"step {view.step}"]
    parts += [f"torch {view.torch}"] if view.torch else []
    parts += [f"python {view.python}"] if view.python else []
    parts += view.devices
    parts += [f"rank {view.rank} of {view.world_size}"] if view.world_size > 1 else []
    parts += [f"git {view.git_commit[:10]}{view.git_commit[40:]}"] if view.git_commit else []
    return ", ".join(part for part in parts if part)


def _call_counts(view: EntryView) -> str:
    text = f"{view.calls_kept} kept"
    if view.calls_dropped:
        text += f", {view.calls_dropped} dropped"
    return text + (f", {plural(view.recomputes, 'recompute')}" if view.recomputes else "")


def _measured(view: EntryView) -> str:
    parts = [] if view.median_s is None else [f"median {duration(view.median_s)}"]
    if view.forward_s is not None:
        parts.append(f"forward {duration(view.forward_s)}")
    if view.flops_forward is not None:
        parts.append(f"{count(view.flops_forward)} FLOPs forward")
    return ", ".join(parts)


def _call(call: CallView) -> str:
    parts = [f"call {call.index}: {call.signature} -> {call.output}"]
    rows = [("in", *_cells(tensor)) for tensor in call.inputs]
    rows += [("out", *_cells(tensor)) for tensor in call.outputs]
    if rows:
        header = ("", "TENSOR", "DTYPE", "SHAPE", "STRIDE", "DEVICE", "")
        parts.append(indent(table(header, rows)))
    if call.tensors > len(rows):
        parts.append(indent(f"... {plural(call.tensors, 'tensor')} in all"))
    if call.notes:
        parts.append(indent(f"note: {'; '.join(map(clean, call.notes))}"))
    if call.mutated:
        parts.append(indent(f"changed by the call: {', '.join(map(_short, call.mutated))}"))
    if call.gradients:
        parts.append(indent(f"gradients kept: {', '.join(map(clean, call.gradients))}"))
    return "\n".join(parts)


def _cells(tensor: TensorView) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    stride = "contiguous" if tensor.contiguous else ",".join(map(str, tensor.stride))
    notes = ["grad"] if tensor.requires_grad else []
    notes += [] if tensor.kept else ["shape only"]
    return tensor.path, tensor.dtype, shape, stride, tensor.device, " ".join(notes)
