"""Opens a page in the Chromium of PySide6 and prints, as JSON, what a script finds in it.

    python -m tests.tools._page_in_browser PAGE WIDTH light|dark [SCREENSHOT] < SCRIPT

The script is an expression of JavaScript. Printed are its `value`, the `messages` of the console
and the addresses that were `requested`. Without a screen, and off the record.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"  # root may not have one, and the page is our own

import shiboken6
from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineUrlRequestInfo,
    QWebEngineUrlRequestInterceptor,
)
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

_HEIGHT = 900
_PAINTED_MILLISECONDS = 300
_SCHEMES = {"dark": 0, "light": 1}  # of Blink


class _Requests(QWebEngineUrlRequestInterceptor):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def interceptRequest(self, info: QWebEngineUrlRequestInfo) -> None:
        self.addresses.append(info.requestUrl().toString())


class _Page(QWebEnginePage):
    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.messages: list[str] = []

    def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:
        self.messages.append(f"{source}:{line}: {message}")


def main(path: str, width: str, scheme: str, screenshot: str = "") -> None:
    script = sys.stdin.read()
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = (
        f"--disable-gpu --blink-settings=preferredColorScheme={_SCHEMES[scheme]}"
    )
    application = QApplication([])
    profile, requests = QWebEngineProfile(), _Requests()
    profile.setUrlRequestInterceptor(requests)
    page, view = _Page(profile), QWebEngineView()
    view.setPage(page)
    view.resize(int(width), _HEIGHT)
    view.show()

    def report(value: str) -> None:
        found = {"value": json.loads(value), "messages": page.messages}
        print(json.dumps({**found, "requested": requests.addresses}))
        if not screenshot:
            application.quit()
            return
        QTimer.singleShot(
            _PAINTED_MILLISECONDS, lambda: (view.grab().save(screenshot), application.quit())
        )

    page.loadFinished.connect(lambda _: page.runJavaScript(f"JSON.stringify({script})", report))
    page.load(QUrl.fromLocalFile(str(Path(path).absolute())))
    application.exec()
    for each in (view, page, profile):  # in this order, or Qt complains
        shiboken6.delete(each)


if __name__ == "__main__":
    main(*sys.argv[1:])
