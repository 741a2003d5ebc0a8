"""The page of `sonde watch --serve`, asked over HTTP: who gets it, and what is new for whom."""

from __future__ import annotations

import http.client
import json
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


def test_a_page_gets_what_it_does_not_show_yet(tmp_path: Path) -> None:
    run = FollowedRun(write_run(tmp_path, 12, end=False))
    with served([run]) as site:
        news = _news(site)
        assert (news["version"], news["title"]) == (1, "small language model: Time it first")
        assert "window 120" in news["top"]
        figures = _news(site, path="figures")
        assert (figures["version"], len(figures["roots"]), len(figures["figures"]["roots"])) == (1, 7, 7)
        assert all(f'id="{place}"' in figures["rest"] for place in figures["roots"].values())
        assert _news(site, path="figures") == figures  # drawn once
        assert "top" not in _news(site, seen=1)
        written(tmp_path, [header_record(), reading_record(12, 13)])
        run.refresh()
        assert "window 130" in _news(site, seen=1)["top"]
        assert _news(site, path="figures")["version"] == 2


def test_several_runs_and_one_without_a_reading(tmp_path: Path) -> None:
    written(tmp_path / "begun", [header_record(run="<b>begun")])
    folders = [write_policy_run(tmp_path / "policy", 12), tmp_path / "begun"]
    with served([FollowedRun(folder) for folder in folders]) as site:
        news = _news(site, run=1)
        assert [news["bar"].count(said) for said in ("adding by GRPO", "&lt;b&gt;begun", "No reading yet")] == [1] * 3
        assert news["bar"].index('aria-current="true"') > news["bar"].index("adding by GRPO")
        assert "no reading yet" in news["top"]
        figures = _news(site, run=1, path="figures")
        assert (figures["roots"], "How this was measured" in figures["rest"]) == ({}, True)
        assert "Entropy" in _news(site, run=0)["top"]


def test_a_port_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    run = FollowedRun(write_run(tmp_path, 3))
    used = r"--port \d+ cannot be used \(Address already in use\): leave --port out for a free one"
    with Site([run]) as site, pytest.raises(ValueError, match=used):
        Site([run], port=site.server_port)
