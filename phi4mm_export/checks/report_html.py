"""The evaluation as one HTML page: no script, no network, the same bytes for the same evaluation.

The template and its style lie in `data/`; charts are inline SVG (checks/charts.py). Every figure shows three digits
and carries all of them in its `title`.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from phi4mm_export.checks import charts
from phi4mm_export.checks.evaluation import SCHEMA_VERSION, ComponentLayers, Evaluation, Sample, plain
from phi4mm_export.checks.text_probes import TextProbes

MAX_NBYTES = 300_000
"""The page may be attached to a mail or an issue."""
WORST_LAYERS = 12
LONGEST_TEXT = 600
"""Characters of an answer that are shown."""
NOTHING = "–"
GATE_NAMES = {"min_cosine": "cosine", "max_rel_l2": "relative L2", "max_kl": "KL divergence"}


@dataclass(frozen=True)
class Room:
    """How much of long lists is shown."""

    answers: int
    samples: int
    pictures: int
    layers: bool = True


ROOMS = (Room(60, 250, 4), Room(24, 100, 4), Room(12, 40, 2), Room(6, 20, 1, layers=False), Room(2, 5, 0, layers=False))
"""Tried in turn until the page is small enough."""


def report_html(evaluation: Evaluation) -> bytes:
    """The page, UTF-8, at most MAX_NBYTES: of very large evaluations it shows the worst and counts the rest."""
    page = b""
    for room in ROOMS:
        page = _page(evaluation, room)
        if len(page) <= MAX_NBYTES:
            break
    return page


def _page(evaluation: Evaluation, room: Room) -> bytes:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    data = resources.files("phi4mm_export.checks").joinpath("data")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(data.joinpath("report.html.j2").read_text("utf-8"))
    answers = sorted(evaluation.answers, key=lambda a: -(a.end_to_end.kl_mean or 0.0))[: room.answers]
    samples = sorted(evaluation.samples, key=_badness)[: room.samples]
    rows = [layer for part in evaluation.layers for layer in part.layers]
    prefixes = {part.component: shared_prefix([layer.layer for layer in part.layers]) for part in evaluation.layers}
    prefixes |= {
        verdict.component: shared_prefix([impact.layer for impact in verdict.impacts])
        for verdict in evaluation.blame
        if verdict.component not in prefixes
    }
    text = template.render(
        e=evaluation,
        style=Markup(data.joinpath("report.css").read_text("utf-8").strip()),
        schema_version=SCHEMA_VERSION,
        gate_names=GATE_NAMES,
        tiles=_tiles(evaluation),
        components=_components(evaluation),
        component_plot=Markup(charts.component_plot(_component_points(evaluation))),
        layer_plot=Markup(charts.layer_plot(rows)) if rows and room.layers else "",
        layer_legend=sorted({row.bits for row in rows}),
        layers=[_layer_part(part, prefixes[part.component], bars=room.layers) for part in evaluation.layers],
        prefixes=prefixes,
        pictures=[_picture(picture) for picture in evaluation.pictures[: room.pictures]],
        answers=answers,
        samples=samples,
        left_out={
            "answers": len(evaluation.answers) - len(answers),
            "samples": len(evaluation.samples) - len(samples),
        },
        has_fields=any(a.probes.fields for a in answers),
        has_rates=any(a.probes.wer is not None for a in answers),
        **_formats(Markup),
    )
    return text.encode("utf-8") + b"\n"


def _formats(markup: Any) -> Mapping[str, Any]:
    """What the template calls to show a value; `markup` marks text that is HTML already."""

    def shown(value: Any, text: str) -> Any:
        return markup('<span title="{}">{}</span>').format(exact(value), text)

    def num(value: float | None) -> Any:
        short = brief(value)
        return short if value is None or short == exact(value) else shown(value, short)

    return {
        "exact": exact,
        "num": num,
        "fine": lambda value: NOTHING if value is None else shown(value, f"{plain(value):.5f}"),
        "percent": lambda value: NOTHING if value is None else shown(value, f"{plain(value):.1%}"),
        "size": lambda value: shown(value, size(value)),
        "share": lambda value, whole: shown(whole, f"{value / whole:.0%}" if whole else NOTHING),
        "meter": lambda value: markup(charts.meter(charts.log_share(value))),
        "bar": lambda value, whole: markup(charts.meter((value or 0.0) / whole if whole else 0.0)),
        "inner_name": inner_name,
        "breakable": lambda name: markup("/<wbr>").join(str(name).split("/")),
        "short": lambda text: _shortened(text.strip()) or "(empty)",
        "hits": _hits,
        "anls": lambda probes: num(_mean_anls(probes)),
    }


def exact(value: float | None) -> str:
    """A figure as it stands in the JSON."""
    return json.dumps(plain(value))


def brief(value: float | None) -> str:
    """Three significant digits; whole numbers in full."""
    if value is None:
        return NOTHING
    if isinstance(value, int):
        return str(value)
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        digits = f"{value:#.3g}"
        return f"{float(digits):,.0f}" if "e" in digits else digits.rstrip(".")
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(power)}"


def size(nbytes: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def shared_prefix(names: Sequence[str]) -> str:
    """The folders that all names begin with: "tower/" for "tower/layers.0/mlp", "tower/norm" and "tower" itself."""
    longest = max(names, key=len, default="")
    ends = [index + 1 for index, sign in enumerate(longest) if sign == "/"]
    shared = [longest[:end] for end in ends if all(f"{name}/".startswith(longest[:end]) for name in names)]
    return max(shared, key=len, default="")


def inner_name(name: str, prefix: str) -> str:
    """A layer's name without the shared folders; the folder's own last part where nothing else is left."""
    return name[len(prefix) :] or name.rpartition(".")[2]


def _tiles(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The four figures that a reader looks for first."""
    measured = [c for c in evaluation.components if c.relative_l2_worst is not None]
    tiles: list[dict[str, Any]] = []
    if evaluation.sizes:
        mine, theirs = sum(s.nbytes for s in evaluation.sizes), sum(s.nbytes_float for s in evaluation.sizes)
        tiles.append(
            {"label": "Size of the graphs", "figure": f"{mine / theirs:.0%}", "sub": f"{size(mine)} of {size(theirs)}"}
        )
    if measured:
        worst = max(measured, key=lambda c: c.relative_l2_mean or 0.0)
        tiles.append(
            {"label": "Largest relative L2", "figure": brief(worst.relative_l2_mean), "sub": f"{worst.component}, mean"}
        )
    modes = [row for row in evaluation.modes if row.end_to_end.kl_mean is not None]
    if modes:
        row = max(modes, key=lambda each: each.end_to_end.kl_mean or 0.0)
        tiles.append(
            {
                "label": "Largest KL divergence",
                "figure": brief(row.end_to_end.kl_mean),
                "sub": f"nats, end to end, mode {row.mode}",
            }
        )
        total = sum(each.end_to_end.positions for each in modes)
        same = sum((each.end_to_end.top1 or 0.0) * each.end_to_end.positions for each in modes) / total
        tiles.append({"label": "Same top token", "figure": f"{same:.1%}", "sub": f"of {total} positions, end to end"})
    return tiles


def _components(evaluation: Evaluation) -> list[dict[str, Any]]:
    sizes = {each.component: asdict(each) for each in evaluation.sizes}
    blank = {"nbytes": 0, "nbytes_float": 0, "format": NOTHING, "format_float": NOTHING}
    return [{**blank, **sizes.get(c.component, {}), **asdict(c)} for c in evaluation.components]


def _component_points(evaluation: Evaluation) -> list[tuple[str, float, float]]:
    return [
        (c["component"], c["nbytes"] / c["nbytes_float"], c["relative_l2_mean"])
        for c in _components(evaluation)
        if c["nbytes_float"] and c["relative_l2_mean"] is not None
    ]


def _layer_part(part: ComponentLayers, prefix: str, *, bars: bool) -> dict[str, Any]:
    from markupsafe import Markup

    layers = part.layers
    worst = sorted((layer for layer in layers if layer.made), key=lambda layer: -(layer.made or 0.0))[:WORST_LAYERS]
    top = max((value for layer in layers for value in (layer.made, layer.accumulated) if value), default=0.0)
    titles = [
        f"{inner_name(layer.layer, prefix)}: made {exact(layer.made)}, accumulated {exact(layer.accumulated)}; "
        f"{layer.operator}, {layer.bits} bits, {layer.nbytes} bytes, in float {layer.nbytes_float}"
        for layer in layers
    ]
    return {
        "component": part.component,
        "request": part.request,
        "remark": part.remark or ("" if layers else "none have weights"),
        "top": top,
        "chart": Markup(charts.layer_bars(layers, titles if bars else [], top)),
        "prefix": prefix,
        "first": inner_name(layers[0].layer, prefix) if layers else "",
        "last": inner_name(layers[-1].layer, prefix) if layers else "",
        "worst": worst,
    }


def _picture(picture: Any) -> dict[str, Any]:
    def uri(png: bytes) -> str:
        return f"data:image/png;base64,{b64encode(png).decode('ascii')}" if png else ""

    return {
        "request": picture.request,
        "relative_l2": picture.relative_l2,
        "largest": picture.largest,
        "thumbnail": uri(picture.thumbnail),
        "error_map": uri(picture.error_map) if picture.relative_l2 else "",
    }


def _badness(sample: Sample) -> tuple[float, str, str]:
    error = sample.fidelity.relative_l2
    return (-error if error is not None else float("-inf"), sample.component, sample.request)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def _hits(probes: TextProbes) -> str:
    return f"{sum(hit.exact for hit in probes.fields)} of {len(probes.fields)}" if probes.fields else NOTHING


def _mean_anls(probes: TextProbes) -> float | None:
    scores: Sequence[float] = [hit.anls for hit in probes.fields]
    return sum(scores) / len(scores) if scores else None
