"""Spreading a model over ranks: mesh, groups, data, tensor, pipeline and context parallel. Applied from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.parallel.apply import Build, build_engine
    from phalanx.parallel.config import ParallelConfig
    from phalanx.parallel.engine import Engine
    from phalanx.parallel.feasible import Task
    from phalanx.parallel.layout_choice import Machines, choose_layout
    from phalanx.parallel.mesh import Mesh

__all__ = ["Build", "Engine", "Machines", "Mesh", "ParallelConfig", "Task", "build_engine", "choose_layout"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "phalanx.parallel.apply": ["Build", "build_engine"],
        "phalanx.parallel.layout_choice": ["Machines", "choose_layout"],
        "phalanx.parallel.feasible": ["Task"],
        "phalanx.parallel.config": ["ParallelConfig"],
        "phalanx.parallel.engine": ["Engine"],
        "phalanx.parallel.mesh": ["Mesh"],
    },
)
