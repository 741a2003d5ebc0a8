"""The page of `sonde watch --serve`, asked over HTTP: who gets it, and what is new for whom."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sonde.runs.watch.follow import FollowedRun
from sonde.runs.watch.serve import Site
from tests.runs.report.plausible_policy import write_policy_run
from tests.runs.report.plausible_run import header_record, reading_record, write_run, written


@contextmanager
def _served(*folders: Path) -> Iterator[tuple[Site, list[FollowedRun]]]:
    runs = [FollowedRun(folder) for folder in folders]
    with Site(runs) as site:
        threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield site, runs
        site.shutdown()


def _asked(site: Site, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", site.server_port, timeout=20)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def _query(site: Site) -> str:
    return urlsplit(site.address).query


def test_only_who_knows_the_token_and_calls_this_machine_by_its_name_is_answered(tmp_path: Path) -> None:
    with _served(write_run(tmp_path, 12)) as (site, _):
        token, port = _query(site), site.server_port
        for path in ("/", "/news"):
            for query in ("", "?token=", "?token=%E2%82%AC", f"?{token}x", f"?{token[:-1]}"):
                assert _asked(site, path + query)[0] == 403, query
            # A name that another site has pointed to this machine (DNS rebinding), even with the token.
            for host in (
                "evil.example",
                f"evil.example:{port}",
                "127.0.0.1.evil.example",
                f"localhost.evil:{port}",
                "",
            ):
                status, text = _asked(site, f"{path}?{token}", host)
                assert (status, "small language model" in text) == (403, False), host
        # A tunnel leads another port of another machine here.
        for host in (f"127.0.0.1:{port}", "localhost:9000", "localhost"):
            assert _asked(site, f"/?{token}", host)[0] == 200
        assert site.server_address[0] == "127.0.0.1"
        assert _asked(site, f"/records.jsonl?{token}")[0] == 404
        assert _asked(site, f"/news?run=7&{token}")[0] == 404


def _news(site: Site, run: int = 0, **seen: int) -> dict[str, Any]:
    query = "".join(f"&{name}={version}" for name, version in seen.items())
    status, text = _asked(site, f"/news?{_query(site)}&run={run}{query}")
    assert status == 200
    news: dict[str, Any] = json.loads(text)
    return news


def test_a_page_gets_what_it_does_not_show_yet(tmp_path: Path) -> None:
    write_run(tmp_path, 12, end=False)
    with _served(tmp_path) as (site, [run]):
        news = _news(site)
        version = news["first"]["version"]
        assert (version, "window 120" in news["first"]["html"]) == (1, True)
        assert news["runs"][0]["badges"] == "Batch too small"
        assert len(news["rest"]["roots"]) == len(news["rest"]["document"]["roots"]) == 7
        assert all(f'id="{place}"' in news["rest"]["html"] for place in news["rest"]["roots"].values())
        seen = {"first": version, "rest": version}
        assert (_news(site, **seen)["first"], _news(site, **seen)["rest"]) == (None, None)
        # Figures take long to draw, so they wait. What is said first is new at once.
        written(tmp_path, [header_record(), reading_record(12, 13)])
        run.refresh()
        news = _news(site, **seen)
        assert "window 130" in news["first"]["html"]
        assert news["rest"] is None
        deadline = time.monotonic() + 60
        while (rest := _news(site, **seen)["rest"]) is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert rest["version"] == 2


def test_several_runs_and_one_without_a_reading(tmp_path: Path) -> None:
    written(tmp_path / "begun", [header_record(run="<b>begun")])
    with _served(write_policy_run(tmp_path / "policy", 12), tmp_path / "begun") as (site, _):
        news = _news(site, run=1)
        assert [run["name"] for run in news["runs"]] == ["adding by GRPO", "<b>begun"]
        assert news["runs"][1]["badges"] == "No reading yet"
        assert "&lt;b&gt;begun" in news["first"]["html"]
        assert "no reading yet" in news["first"]["html"]
        assert (news["rest"]["roots"], "How this was measured" in news["rest"]["html"]) == ({}, True)
        assert "Entropy" in _news(site, run=0)["first"]["html"]


def test_a_port_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    run = FollowedRun(write_run(tmp_path, 3))
    with Site([run]) as site:
        with pytest.raises(ValueError, match=f"port {site.server_port} of 127.0.0.1 cannot be used, it is in use: lea"):
            Site([run], port=site.server_port)
        with pytest.raises(ValueError, match="a port is a number from 0 to 65535, got 65536"):
            Site([run], port=65536)
