"""The look of all figures, as data: part of what draws a figure, so that an edit redraws figures and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from erpo.config.run import Frozen, PositiveInt

STYLE = Path(__file__).with_name("style.yaml")
_Positive = Annotated[float, Field(gt=0)]


class FigureStyle(Frozen):
    """Sizes in points, unless said otherwise."""

    font: str
    """Font family; one that is not installed is refused when a figure is drawn."""
    font_size: _Positive
    """Axis labels and legends."""
    title_size: _Positive
    """Titles of panels."""
    line_width: _Positive
    """Lines of runs."""
    marker_size: _Positive
    """Markers on lines."""
    grid_colour: str
    """Grid lines."""
    band_opacity: Annotated[float, Field(ge=0, le=1)]
    """Bands of uncertainty."""
    colours: Annotated[tuple[str, ...], Field(min_length=1)]
    """Of runs."""
    dashes: Annotated[tuple[tuple[float, ...], ...], Field(min_length=1)]
    """Of runs: strokes and gaps in line widths; empty: solid."""
    markers: Annotated[tuple[str, ...], Field(min_length=1)]
    """Of runs."""
    same_look: dict[str, str]
    """Runs that are drawn as another run is: the same method on another model. Drawn together they differ all the same."""
    panel_size: tuple[_Positive, _Positive]
    """Width and height of a panel, inches."""
    single_width: _Positive
    """Width of a figure with one panel in a row, inches."""
    png_dpi: PositiveInt
    """Resolution of the PNG."""


def load_style(path: Path = STYLE) -> FigureStyle:
    """Read the style.

    Raises:
        ValueError: an unknown key or a value out of range, in one sentence.
    """
    try:
        return FigureStyle(**yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ValueError(f"{path}: {'; '.join(faults)}") from error
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
