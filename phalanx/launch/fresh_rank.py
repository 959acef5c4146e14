"""A fresh start, a script in an interpreter of its own: the template executes ``fresh_rank.py … SCRIPT ARGUMENTS``.

All is as after ``python -u SCRIPT ARGUMENTS``: what the script sets before it imports torch counts, files in its folder
go before modules of Python, and it ends as Python ends. So nothing is imported here that Python has not imported by
itself, and what is needed of ours later leaves no module behind that a file of the script may be meant by.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any

_PROGRESS, _AGENDA = "PHALANX_PROGRESS", "PHALANX_AGENDA"
_HOOKS = "phalanx.launch.script_hooks"


def main() -> None:
    """Become the rank that the arguments name (`phalanx.launch.rank_process.execute_rank`), and run its script."""
    reports, stacks_signal, home, folder, entry, is_module, *sys.argv = sys.argv[1:]
    os.set_inheritable(int(reports), False)  # what the script starts, or becomes, does not report
    os.chdir(folder)
    if not sys.flags.safe_path:
        sys.path[0] = entry
    sys.path += [] if home in sys.path else [home]
    ours = _Ours(path for path in sys.path if path != entry)
    rank, process = int(os.environ["RANK"]), os.getpid()
    sys.orig_argv[:] = [sys.executable, "-u", *(["-m"] if is_module else []), *sys.argv]
    _name_process(f"phalanx rank {rank}")
    faulthandler.enable()
    _install_hooks(ours, int(stacks_signal))

    def report_end(error: BaseException | None) -> None:
        has_threads = len(sys._current_frames()) > 1  # that may keep it; what is plain, the exit status says
        is_plain = error is None or (isinstance(error, SystemExit) and not error.code)
        if os.getpid() == process and (has_threads or not is_plain):  # not of a process that it has forked
            ours.call("phalanx.launch.rank_process", "report_end", int(reports), rank, error)

    try:
        _run(sys.argv[0], bool(is_module))
    except SystemExit as stop:
        report_end(stop)
        raise
    except BaseException:
        show = sys.excepthook

        def show_and_report(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
            while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
                frames = frames.tb_next
            show(kind, error.with_traceback(frames), frames)
            report_end(error)
            if kind is KeyboardInterrupt:
                try:  # noqa: SIM105 - what was imported to report has Python forget that it ends by this
                    exec("raise KeyboardInterrupt")
                except KeyboardInterrupt:
                    pass

        sys.excepthook = show_and_report
        raise  # Python shows it, and ends
    report_end(None)


def _run(name: str, is_module: bool) -> None:
    if is_module:
        import runpy  # as ``python -m`` does

        new_main(None)
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        return
    path = os.path.join(os.getcwd(), name.removeprefix("./"))  # noqa: PTH109, PTH118
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, vars(new_main(path)))


def new_main(path: str | None) -> ModuleType:
    """A fresh ``__main__``, with what Python gives it; a spawned child's ``__mp_main__`` is the same."""
    main = type(sys)("__main__")
    sources = sys.modules["_frozen_importlib_external"]
    loader = sources.SourceFileLoader("__main__", path) if path is not None else None
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={}, __loader__=loader)
    if path is not None:
        vars(main).update(__file__=path, __cached__=None)
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing was imported before
        sys.modules["__mp_main__"] = main
    return main


class _Ours:
    """Functions of ours, imported from `paths` when they are needed."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = list(paths)

    def call(self, module: str, name: str, *arguments: Any) -> None:
        """Call one; nothing where the script has put something else in the place of what it needs."""
        before, path = {*sys.modules}, sys.path
        sys.path = self._paths
        try:
            function = getattr(__import__(module, fromlist=[name]), name)
        except Exception:  # whatever the script's modules do
            return
        finally:
            sys.path = path
            for new in {*sys.modules} - before:
                if new.partition(".")[0] in sys.stdlib_module_names:
                    del sys.modules[new]  # the script may have a file of that name
        function(*arguments)


def _name_process(name: str) -> None:
    try:
        with open("/proc/self/comm", "w") as file:  # noqa: PTH123
            file.write(name)
    except OSError:
        pass


def _install_hooks(ours: _Ours, stacks_signal: int) -> None:
    """Stacks on a signal, faults on purpose, steps on the page, and process groups that end well."""
    page = os.environ.get(_PROGRESS)
    if page:
        try:
            file = open(f"{page}.stacks", "a")  # noqa: PTH123, SIM115 - faulthandler keeps it
            faulthandler.register(stacks_signal, file=file, all_threads=True, chain=False)
        except OSError:
            pass
    environ, began_ns = dict(os.environ), time.monotonic_ns()
    when_imported("torch", lambda _: ours.call(_HOOKS, "note_imports", environ, began_ns))
    when_imported("torch.optim.optimizer", lambda module: ours.call(_HOOKS, "count_steps_on_page", module, environ))
    when_imported("torch.distributed", lambda module: ours.call(_HOOKS, "end_groups_well", module))
    if _AGENDA in os.environ:
        ours.call("phalanx.faults.inject", "install_from_environment", os.environ, when_imported)


def is_being_imported(module: Any) -> bool:
    """Whether the code of a module has not come to its end yet; looked up as Python's own import does."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def when_imported(name: str, act: Callable[[Any], Any]) -> None:
    """Call ``act(module)`` once the module `name` has been imported: now, or at the end of its first import."""
    module = sys.modules.get(name)
    if module is not None and not is_being_imported(module):
        act(module)
    else:
        sys.meta_path.insert(0, _ImportHook(name, act))


class _ImportHook:
    """Finds one module as all others would, and acts after its code has run."""

    def __init__(self, name: str, act: Callable[[Any], Any]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run(module)
                self._act(module)

            loader.exec_module = run_and_act
        return spec


if __name__ == "__main__":
    main()
