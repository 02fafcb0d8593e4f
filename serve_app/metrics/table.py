"""Every metric as Markdown, from where they are declared: `python -m serve_app.metrics.table`."""

import sys

from serve_app.metrics.catalogue import EXPORTED, RAY_ONLY, Metric, common_labels


def metrics_table() -> str:
    """One table for `/metrics`, one for what only Ray is told."""
    tables = {
        "**On `/metrics`**": [_row(metric, common_labels(metric)) for metric in EXPORTED],
        "**Only in Ray's export**": [_row(metric, ()) for metric in RAY_ONLY],
    }
    parts = ("\n".join([title, "", *_HEAD, *rows]) for title, rows in tables.items())
    return "\n\n".join(parts) + "\n"


_HEAD = ("| name | kind | labels | in Ray as | what it is |", "|---|---|---|---|---|")


def _row(metric: Metric, common: tuple[str, ...]) -> str:
    own = [
        f"`{name}` ({', '.join(values)})" if values else f"`{name}`"
        for name, values in metric.labels.items()
    ]
    labels = ", ".join([*(f"`{name}`" for name in common), *own])
    suffix = "_total" if metric.name.endswith("_total") else ""
    in_ray = f"`ray_{metric.ray_name}{suffix}`" if metric.in_ray else "no"
    return f"| `{metric.name}` | {metric.kind} | {labels} | {in_ray} | {metric.help} |"


if __name__ == "__main__":
    sys.stdout.write(metrics_table())
