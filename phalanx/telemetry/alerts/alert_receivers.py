"""Who hears of an alert: a web address, services that apprise knows (mail, chat), a command; a thread for each.

Sending never holds up who watches: queues are bounded, every try has a timeout, and what fails is tried again after
pauses that grow. No message says more of an address than `shown_address` does.
"""

from __future__ import annotations

import http.client
import json
import logging
import queue
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Generic, Protocol, TypeVar

from phalanx.core.errors import UserError
from phalanx.telemetry.alerts.alert_config import AlertsConfig, require_web, resolved_address, shown_address
from phalanx.telemetry.alerts.alert_episodes import Alert

TIMEOUT_S = 10.0
PAUSES_S = (1.0, 5.0, 30.0, 120.0)  # between tries; after the last one an alert is given up
MOST_WAITING = 100
_LONGEST_HURRIED_S = 1.0
_LAST_TRY_S = 12.0


class Message(Protocol):
    """What is sent: an alert, or an incident of a job."""

    def to_json(self) -> Mapping[str, Any]:
        """Plain values."""


Sent = TypeVar("Sent", bound=Message)
Taken = TypeVar("Taken", bound=Message, contravariant=True)


class Receiver(Protocol[Taken]):
    """One place where messages go."""

    @property
    def name(self) -> str:
        """For messages, without secrets."""

    def send(self, message: Taken, /) -> str:
        """Hand one over, within some `TIMEOUT_S`; why it was not taken, empty: it was."""


class PostedTo:
    """An http or https address that gets messages as JSON; redirects are not followed."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._url, self._timeout_s = url, timeout_s
        self.name = shown_address(url)
        self._opener = urllib.request.build_opener(_NoRedirects)

    def send(self, message: Message, /) -> str:
        """Post it once."""
        headers = {"Content-Type": "application/json", "User-Agent": "phalanx"}
        body = json.dumps(message.to_json(), ensure_ascii=False, default=str).encode(errors="replace")
        request = urllib.request.Request(self._url, body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return "" if 200 <= answer.status < 300 else f"status {answer.status}"
        except urllib.error.HTTPError as error:
            error.close()
            return f"status {error.code}"
        except (OSError, http.client.HTTPException) as error:  # its text may hold the address
            return type(getattr(error, "reason", None) or error).__name__


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """What was meant for one receiver is not sent to another."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Service:
    """A service of apprise: mail, Slack, Matrix, ntfy and a hundred others.

    Raises:
        UserError: apprise is not installed, or does not know such an address.
    """

    def __init__(self, url: str, field: str) -> None:
        self.name = shown_address(url)
        if find_spec("apprise") is None:
            cure = "run: pip install 'phalanx-train[alerts]', or use alerts.webhook or alerts.command"
            raise UserError("needs a package that is not installed (apprise)", cure=cure, field=field)
        import apprise  # slow to import, and only some runs need it

        logging.getLogger("apprise").setLevel(logging.CRITICAL)  # it writes addresses into its messages
        self._apprise = apprise
        self._service = apprise.Apprise()
        if not self._service.add(url):
            cure = "see https://github.com/caronc/apprise/wiki for how addresses are written"
            raise UserError("is no address that apprise knows", cure=cure, field=field, value=self.name)

    def send(self, alert: Alert, /) -> str:
        """Send it once."""
        types = {"error": "failure", "warning": "warning", "info": "info"}
        title = f"phalanx {alert.run}: {alert.title}"[:200]
        try:
            sent = self._service.notify(body=alert.text(), title=title, notify_type=types[alert.severity])
        except Exception as error:
            return type(error).__name__
        return "" if sent else "the service did not take it"


class Command:
    """A program that is run once for each alert, without a shell, with the alert as JSON on its stdin."""

    def __init__(self, words: Sequence[str], timeout_s: float = 3 * TIMEOUT_S) -> None:
        self._words, self._timeout_s = list(words), timeout_s
        self.name = f"command {words[0]}"

    def send(self, alert: Alert, /) -> str:
        """Run it; it is killed when it takes too long."""
        text = json.dumps(alert.to_json(), ensure_ascii=False, default=str) + "\n"
        try:
            done = subprocess.run(
                self._words,
                input=text.encode(errors="replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it took more than {self._timeout_s:g} s"
        except OSError as error:
            return error.strerror or type(error).__name__
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return "" if done.returncode == 0 else ": ".join([f"exit status {done.returncode}", *said])


def receivers_of(config: AlertsConfig, environ: Mapping[str, str]) -> list[Receiver[Alert]]:
    """Everybody who is to hear of alerts.

    Raises:
        UserError: one of them cannot be: an address is wrong or missing, a package is not installed.
    """
    found: list[Receiver[Alert]] = []
    if config.webhook.get_secret_value():
        address = resolved_address(config.webhook, environ, "alerts.webhook")
        require_web(address, "alerts.webhook")
        found.append(PostedTo(address))
    for index, url in enumerate(config.urls):
        field = f"alerts.urls.{index}"
        found.append(Service(resolved_address(url, environ, field), field))
    if config.command:
        if not config.command[0]:
            raise UserError("names no program", cure="give its path first", field="alerts.command")
        found.append(Command(config.command))
    return found


def addresses_of(config: AlertsConfig, environ: Mapping[str, str]) -> list[str]:
    """What no report may show."""
    names = {str(index): url for index, url in enumerate(config.urls)} | {"webhook": config.webhook}
    given = {name: url for name, url in names.items() if url.get_secret_value()}
    return [resolved_address(url, environ, f"alerts.{name}") for name, url in given.items()]


def require_no_address(config: AlertsConfig) -> None:
    """See that a config can be handed to another host as a file.

    Raises:
        UserError: it holds an address, which may be secret.
    """
    for name, url in (("webhook", config.webhook), *((f"urls.{n}", url) for n, url in enumerate(config.urls))):
        text = url.get_secret_value()
        if text and shown_address(text) != text:
            cure = "write env:NAME, and give the job that variable"
            field = f"run.alerts.{name}"
            raise UserError("is an address that the files of the job would hold", cure=cure, field=field)


class Outbox(Generic[Sent]):
    """Sends messages to all receivers, each in its own thread and in order.

    Args:
        done: called in these threads with the message, the receiver's name, and why it was given up (empty: it
            was not).
    """

    def __init__(
        self,
        receivers: Sequence[Receiver[Sent]],
        done: Callable[[Mapping[str, Any], str, str], None] = lambda message, name, problem: None,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._done, self._pauses_s = done, tuple(pauses_s)
        self._hurry = threading.Event()
        self._lines = [(receiver, queue.Queue[Sent | None](MOST_WAITING)) for receiver in receivers]
        self._threads = [
            threading.Thread(target=self._work, args=line, name="alerts", daemon=True) for line in self._lines
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Sent) -> None:
        """Have it sent; returns at once."""
        for receiver, waiting in self._lines:
            try:
                waiting.put_nowait(message)
            except queue.Full:
                self._done(message.to_json(), receiver.name, "too many messages wait for it")

    def close(self, within_s: float, *, hurries: bool = False) -> None:
        """Send what waits, and end; blocks for so long at most. Where it `hurries`, without long pauses.

        What no thread has begun to send by then is given up, so that nothing is sent or said of it later.
        """
        end_s = time.monotonic() + within_s
        if hurries:
            self._hurry.set()
        for _, waiting in self._lines:
            try:
                waiting.put(None, timeout=max(end_s - time.monotonic(), 0.0))
            except queue.Full:
                continue
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
        if not hurries and any(thread.is_alive() for thread in self._threads):
            self._hurry.set()  # a last try, so that what is given up is known to be
            for thread in self._threads:
                thread.join(_LAST_TRY_S)
        for (receiver, waiting), thread in zip(self._lines, self._threads, strict=True):
            if thread.is_alive():
                self._give_up(receiver, waiting)

    def _give_up(self, receiver: Receiver[Sent], waiting: queue.Queue[Sent | None]) -> None:
        """Whatever waits for this receiver; its thread, which is at an earlier message, ends after that."""
        with suppress(queue.Empty):
            while True:
                if (message := waiting.get_nowait()) is not None:
                    self._done(message.to_json(), receiver.name, "there was no time left")
        waiting.put(None)

    def _work(self, receiver: Receiver[Sent], waiting: queue.Queue[Sent | None]) -> None:
        while (message := waiting.get()) is not None:
            problem = self._delivered(receiver, message)
            self._done(message.to_json(), receiver.name, problem)

    def _delivered(self, receiver: Receiver[Sent], message: Sent) -> str:
        problem = ""
        for pause_s in (*self._pauses_s, None):
            try:
                problem = receiver.send(message)
            except Exception as error:  # no text: an address stands in many errors
                problem = type(error).__name__
            if not problem or pause_s is None:
                break
            if self._hurry.is_set():
                if pause_s > _LONGEST_HURRIED_S:
                    break
                time.sleep(pause_s)
            else:
                self._hurry.wait(pause_s)
        return problem
