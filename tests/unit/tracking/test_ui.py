"""MLflow's pages are not started here; tests/browser starts them."""

from __future__ import annotations

import logging
import os
import socket

import pytest

from spider.tracking.store import serve


@pytest.fixture(autouse=True)
def starts_nothing(monkeypatch):
    def refuse(*arguments):
        raise AssertionError(f"started {arguments}")

    monkeypatch.setattr(os, "execv", refuse)


def test_a_taken_port_is_named(results):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is taken; name another: .* --port {port + 1}"):
            serve(results, results.config().tracking, port, None)


@pytest.mark.parametrize(
    ("experiment", "page"),
    [(None, "?workflowType=machine_learning"), ("7", "/7/runs?viewStateShareKey=comparison&")],
)
def test_the_address_of_a_server_is_logged_without_its_password(
    results, monkeypatch, caplog, experiment, page
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ada:sesame@tracker.example/")
    with caplog.at_level(logging.INFO):
        serve(results, results.config().tracking, 5000, experiment)
    assert f"https://***@tracker.example/#/experiments{page}" in caplog.text
    assert "sesame" not in caplog.text
