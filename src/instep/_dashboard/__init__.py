"""A live page of a pool, served to this machine alone.

server.py   answers requests, in threads of its own
state.py    what the page is told: the last seconds, and sums
page.html   asks for it twice a second, and draws
"""

from __future__ import annotations

from instep._dashboard.server import Dashboard as Dashboard
