"""How Sphinx builds the site: `make docs`. The source folder is the repository, so links work here as on GitHub."""

from __future__ import annotations

import contextlib
import io
import os
import textwrap
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import sonde

project = "sonde"
version = release = sonde.__version__
html_title = f"sonde {release}"

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/**.rst",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/results/*.md",
    "evidence/*.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "sonde-demo"]  # never looked into: they may be large

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # the anchors that GitHub gives to headings
highlight_language = "text"  # blocks that name no language are equations, shell commands or printed text

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]  # leads from the site's root to the first page
html_copy_source = False
html_show_copyright = False
templates_path: list[str] = []

# The reference, from docstrings.
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
# Not needed for names, and slow to import.
autodoc_mock_imports = ["accelerate", "datasets", "lightning", "transformers", "trl"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Reference", ("Attributes", "params_style")]  # the signature has the attributes' types
python_maximum_signature_line_length = 80
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

nitpicky = True
nitpick_ignore_regex = [
    # The site is built without a network, so there are no inventories of Python's and PyTorch's own pages.
    (r"py:.*", r"(collections|contextlib|pathlib|torch|trl|transformers|accelerate|lightning)\..*"),
    (r"py:class", r"DeviceMesh|Path|SummaryWriter|Tensor|nn\.Module|dist\.ProcessGroup"),
    # Backticks in docstrings hold code of any kind. What is a name of this site becomes a link, the rest stays code.
    (r"py:obj", r".*"),
    # Values and aliases in annotations: `Literal["auto"]`, `MetricName`.
    (r"py:class", r"'.*'"),
    (r"py:class", r"CommHook|GradientsOf|Groups|LogOrPlaces|MetricName|Nonfinite|Objective|Parameters|SequenceWeights"),
    (r"py:class", r"Derive|OnError|Optimizers|Precision|Responses|Sampler|TapName|UnitsPerPiece|Update|Weighting"),
    # Handed from one call of sonde to another, and read by no user.
    (
        r"py:class",
        r"sonde\..*\.(CausesOfBatch|Collected|EntropyChange|EntropyMeasurement|FiniteStep|Result|Scored|Key|Moment|ParameterGroup|Point|PolicyStep|Responses|RowSums|Share|SolvedWindow|T|GuardedProbe|_TrackerSink)",
    ),
]
default_role = "py:obj"


class HelpOf(Directive):
    """What a command prints with `--help`: `.. help-of:: demo entropy`."""

    optional_arguments = 9

    def run(self) -> list[nodes.Node]:
        """A block of text, 80 columns wide."""
        from sonde.cli import main

        os.environ["COLUMNS"] = "80"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main([*self.arguments, "--help"])
        lines = [textwrap.fill(line, 80) for line in printed.getvalue().strip().splitlines()]
        return [nodes.literal_block("", "\n".join(lines), language="text")]


class MetricsOf(Directive):
    """The metrics that a probe writes to the log: `.. metrics-of:: NoiseScaleProbe`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A table of names, units and meanings."""
        metrics = getattr(sonde, self.arguments[0]).METRICS
        group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (4, 2, 6)), cols=3)
        group += nodes.thead("", _row("metric", "unit", "meaning"))
        rows = [_row(nodes.literal(text=name), m.unit.format(unit="units"), m.meaning) for name, m in metrics.items()]
        group += nodes.tbody("", *rows)
        return [nodes.table("", group)]


def _row(*cells: str | nodes.Node) -> nodes.row:
    texts = [nodes.Text(cell) if isinstance(cell, str) else cell for cell in cells]
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", text)) for text in texts))


def _as_restructured_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """`|G|²` in a docstring is a squared norm. reStructuredText would look for a substitution of the name G."""
    if what in ("property", "attribute"):
        lines[:0] = ["..", ""]  # an empty comment, or napoleon takes the words before a colon for the type
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = line.split("`")  # every other part is code
            lines[i] = "`".join(part if k % 2 else part.replace("|", r"\|") for k, part in enumerate(parts))


def _parsable(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Defaults that a dataclass makes anew have no expression; Sphinx could not read such a signature."""
    return signature and signature.replace("<factory>", "..."), returned


def _public_name(app: Sphinx, env: BuildEnvironment, node: nodes.Element, child: nodes.Element) -> nodes.Element | None:
    """The entry of a public name that an annotation gives with the module that defines it."""
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in sonde.__all__:
        return None
    python = env.domains["py"]
    return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], f"sonde.{name}", node, child)


def setup(app: Sphinx) -> None:
    """What no option of Sphinx does."""
    app.add_directive("help-of", HelpOf)
    app.add_directive("metrics-of", MetricsOf)
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)  # before napoleon adds annotations
    app.connect("autodoc-process-signature", _parsable)
    app.connect("missing-reference", _public_name)
