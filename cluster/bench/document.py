"""The frame of a self-contained HTML page: one style, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5b6470; --paper: #ffffff; --panel: #f5f7f9; --rule: #d5dae0;
  --good: #0a7a46; --bad: #b3261e;
  --series-1: #1f6feb; --series-2: #c2570c; --series-3: #0a7f5a; --series-4: #8a3ffc; --series-5: #b5175e;
  --series-6: #5f6b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --dim: #9aa4b0; --paper: #14171b; --panel: #1d2127;
  --rule: #383f48; --good: #58c98f; --bad: #ff8a80;
  --series-1: #6ea8ff; --series-2: #ffa657; --series-3: #4fd0a5; --series-4: #c8a5ff; --series-5: #ff8fbf;
  --series-6: #d6d75a; } }
body { margin: 0 auto; padding: 28px 20px 48px; max-width: 1180px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere; } h2 { font-size: 16px; margin: 32px 0 8px; }
p { margin: 2px 0; } .dim { color: var(--dim); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 10px; margin: 18px 0 0; }
.tile { background: var(--panel); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px; }
figure { margin: 0; background: var(--panel); border-radius: 8px; padding: 10px 12px 6px; }
figcaption { font-weight: 600; font-size: 14px; } svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--dim); } .grid { stroke: var(--rule); stroke-width: 1; }
.axis { stroke: var(--dim); stroke-width: 1; } .line { fill: none; stroke: var(--c); stroke-width: 2; }
.line { stroke-linejoin: round; } .area { fill: var(--c); opacity: 0.15; } .bar { fill: var(--series-1); }
.label { paint-order: stroke; stroke: var(--panel); stroke-width: 3px; }
.mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 3; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 16px 4px 0; text-align: right; border-bottom: 1px solid var(--rule); vertical-align: top; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; color: var(--dim); }
table.words td { text-align: left; overflow-wrap: anywhere; }
.better { color: var(--good); } .worse { color: var(--bad); } .key { display: inline-block; width: 12px;
  height: 12px; border-radius: 3px; margin-right: 6px; }
"""


def document(title: str, body: Iterable[str]) -> str:
    """`body`: parts that are HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], escaped: bool = False, kind: str = "") -> str:
    """Rows of texts; `escaped` when they are HTML already. No heading where `head` is empty."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f"<{tag}>{text if escaped else escape(text)}</{tag}>" for text in texts)

    heading = f"<thead><tr>{cells('th', head)}</tr></thead>" if head else ""
    lines_ = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{heading}<tbody>{lines_}</tbody></table></div>'
