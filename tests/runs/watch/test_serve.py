"""The page of `sonde watch --serve`, asked over HTTP: who gets it, and what is new for whom."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sonde.runs.watch.follow import FollowedRun
from sonde.runs.watch.serve import Site, served
from tests.runs.report.plausible_policy import write_policy_run
from tests.runs.report.plausible_run import header_record, reading_record, write_run, written


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
    with served([FollowedRun(write_run(tmp_path, 12))]) as site:
        token, port = _query(site), site.server_port
        for path in ("/", "/news", "/figures"):
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
        assert _asked(site, f"/news?run=7&{token}")[0] == _asked(site, f"/figures?{token}")[0] == 404


def _news(site: Site, run: int = 0, seen: int | str = "", *, path: str = "news") -> dict[str, Any]:
    status, text = _asked(site, f"/{path}?{_query(site)}&run={run}&seen={seen}")
    assert status == 200
    news: dict[str, Any] = json.loads(text)
    return news


def _rest(site: Site, run: int = 0, seen: int | str = "") -> Any:
    return _news(site, run, seen, path="figures")["rest"]


def test_a_page_gets_what_it_does_not_show_yet(tmp_path: Path) -> None:
    run = FollowedRun(write_run(tmp_path, 12, end=False))
    with served([run]) as site:
        news = _news(site)
        version = news["first"]["version"]
        assert (version, "window 120" in news["first"]["html"]) == (1, True)
        assert news["runs"][0]["badges"] == "About right or too large"
        rest = _rest(site)
        assert (rest["version"], len(rest["roots"]), len(rest["document"]["roots"])) == (1, 7, 7)
        assert all(f'id="{place}"' in rest["html"] for place in rest["roots"].values())
        assert (_news(site, seen=1)["first"], _rest(site, seen=1)) == (None, None)
        # Figures take long to draw, so they wait. What is said first is new at once.
        written(tmp_path, [header_record(), reading_record(12, 13)])
        run.refresh()
        assert "window 130" in _news(site, seen=1)["first"]["html"]
        assert _rest(site, seen=1) is None
        deadline = time.monotonic() + 60
        while (rest := _rest(site, seen=1)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert rest["version"] == 2


def test_several_runs_and_one_without_a_reading(tmp_path: Path) -> None:
    written(tmp_path / "begun", [header_record(run="<b>begun")])
    folders = [write_policy_run(tmp_path / "policy", 12), tmp_path / "begun"]
    with served([FollowedRun(folder) for folder in folders]) as site:
        news = _news(site, run=1)
        assert [run["name"] for run in news["runs"]] == ["adding by GRPO", "<b>begun"]
        assert news["runs"][1]["badges"] == "No reading yet"
        assert "&lt;b&gt;begun" in news["first"]["html"]
        assert "no reading yet" in news["first"]["html"]
        rest = _rest(site, run=1)
        assert (rest["roots"], "How this was measured" in rest["html"]) == ({}, True)
        assert "Entropy" in _news(site, run=0)["first"]["html"]


def test_a_port_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    run = FollowedRun(write_run(tmp_path, 3))
    with Site([run]) as site:
        with pytest.raises(
            ValueError, match=rf"--port {site.server_port} cannot be used \(Address already in use\): lea"
        ):
            Site([run], port=site.server_port)
        with pytest.raises(ValueError, match="leave --port out for a free one"):
            Site([run], port=65536)
