"""The tool `python` of one episode: code of the model, in the sandbox, whose names persist between
calls."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from distflow.sandbox.interface import Broken
from distflow.sandbox.local_sandbox import Sandbox, Session

_SOURCE = '''
import ast as _ast, contextlib as _contextlib, io as _io, sys as _sys, traceback as _traceback

_names = {"__name__": "__main__"}

def run(code):
    """What the code prints, and the value of its last line if that is an expression."""
    printed = _io.StringIO()
    with _contextlib.redirect_stdout(printed), _contextlib.redirect_stderr(printed):
        try:
            body = _ast.parse(code).body
            last = body.pop() if body and isinstance(body[-1], _ast.Expr) else None
            exec(compile(_ast.Module(body, []), "<tool>", "exec"), _names)
            if last is not None:
                value = eval(compile(_ast.Expression(last.value), "<tool>", "eval"), _names)
                if value is not None:
                    print(repr(value))
        except:
            return printed.getvalue() + "".join(_traceback.format_exception_only(_sys.exception())), True
    return printed.getvalue() or "(no output)", False
'''  # noqa: E501


class PythonSession:
    """Its own thread starts the session, waits for each call, which the sandbox's deadline ends,
    and ends the session."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._thread = ThreadPoolExecutor(1, "python-tool")
        self._session: Session | None = None

    async def run(self, code: str) -> tuple[str, bool]:
        """What the code prints, and whether it failed. Raises Raised; Broken, after which a new
        session runs the next call."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._run, code)

    def close(self) -> None:
        """End the session, after the call that runs."""
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _run(self, code: str) -> tuple[str, bool]:
        if self._session is None:
            self._session = self._sandbox.open(_SOURCE)
        self._session.renew_time()

        try:
            printed, failed = self._session.call("run", [code])
        except Broken:
            self._end()
            raise

        return str(printed), bool(failed)

    def _end(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
