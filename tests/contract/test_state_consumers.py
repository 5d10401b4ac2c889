"""Consumers that reduce rows to numbers hold to the contract: `moments`, `reward` and `probe`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headgate.capture.probe import Probe, save
from headgate.capture.schema.consumer import CapturedRequest
from headgate.capture.schema.sites import Site
from headgate.consumers.moments import MomentsConsumer, open_moments
from headgate.consumers.probe import ProbeConsumer
from headgate.consumers.reward import RewardConsumer
from headgate.consumers.testing import EXAMPLE_MODEL, ConsumerContract

DIRECTION = np.random.default_rng(7).normal(size=EXAMPLE_MODEL.hidden_size)


class TestMoments(ConsumerContract):
    consumer_class = MomentsConsumer
    further: ClassVar[Mapping[str, Any]] = {"flush_s": 0}

    def params(self, folder: Path) -> Mapping[str, Any]:
        self.root = folder / "moments"
        return {"root": str(self.root), "tags": ["mine"], **self.further}

    def client_spec(self) -> Any:
        return {"hooks": {"post_mlp": [1, -1], "final_norm": "all"}, "positions": "all", "tag": "mine"}

    def bad_specs(self) -> Mapping[str, Any]:
        hooks = {"post_mlp": [1]}
        return {"tag": {"hooks": hooks, "tag": "of nobody"}, "hooks.nowhere": {"hooks": {"nowhere": "all"}}}

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        num_rows = len(expected.positions)
        skipped = int((expected.positions < self.further.get("skip_positions", 0)).sum())
        assert payload == {
            "tag": "mine",
            "num_rows": (num_rows - skipped) * len(expected.sites),
            "num_skipped": skipped * len(expected.sites),
            "num_past_end": 0,
            "problem": None,
        }
        if num_rows:
            moments = open_moments(self.root)
            for site in expected.sites:
                found = moments.select(site, tag="mine")
                assert found.num_rows + found.num_skipped >= num_rows
                assert found.norm_quantile(1.0) >= np.linalg.norm(expected.rows[site][skipped:].double(), axis=1).max()


class TestMomentsWithoutTheFirstToken(TestMoments):
    further: ClassVar[Mapping[str, Any]] = {"flush_s": 0, "skip_positions": 1, "covariance": "sketch", "rank": 3}


class TestReward(ConsumerContract):
    consumer_class = RewardConsumer

    def params(self, folder: Path) -> Mapping[str, Any]:
        np.save(folder / "joy.npy", DIRECTION)
        np.save(folder / "calm.npy", -DIRECTION)
        files = {name: str(folder / f"{name}.npy") for name in ("joy", "calm")}
        return {"layer": 2, "directions": files, "scale": 3.0, "transform": "tanh", "positions": {"start": 1}}

    def client_spec(self) -> Any:
        return {"direction": "calm"}

    def bad_specs(self) -> Mapping[str, Any]:
        return {"direction": {"direction": "sorrow"}}

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        ((_, tensor),) = expected.rows.items()
        rows = tensor.double().numpy()[1:]
        assert payload["num_positions"] == len(rows)
        if not len(rows):
            assert payload == {"reward": None, "cos": None, "act_norm": None, "num_positions": 0, "status": "no_rows"}
            return
        norms = np.linalg.norm(rows, axis=1)
        cos = (rows @ -DIRECTION / np.linalg.norm(DIRECTION) / norms).mean()
        assert payload["status"] == "ok"
        assert payload["cos"] == pytest.approx(cos, abs=1e-6)
        assert payload["act_norm"] == pytest.approx(norms.mean())
        assert payload["reward"] == pytest.approx(np.tanh(3.0 * cos), abs=1e-6)


class TestProbe(ConsumerContract):
    consumer_class = ProbeConsumer

    def params(self, folder: Path) -> Mapping[str, Any]:
        weight = np.random.default_rng(8).normal(size=(2, EXAMPLE_MODEL.hidden_size))
        sites = {"deep": "3.post_mlp", "last": "final_norm"}
        self.probes = {
            name: Probe(site=Site.parse(site), weight=weight, classes=("a", "b")) for name, site in sites.items()
        }
        for name, probe in self.probes.items():
            save(folder / f"{name}.safetensors", probe)
        return {"probes": {name: str(folder / f"{name}.safetensors") for name in sites}}

    def client_spec(self) -> Any:
        return {"probes": ["last", "deep"]}

    def bad_specs(self) -> Mapping[str, Any]:
        return {"probes[0]": {"probes": ["shallow"]}, "layers": {"layers": [1]}}

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        assert payload["positions"] == expected.positions.tolist()
        assert payload["num_prompt_tokens"] == expected.final.num_prompt_tokens
        for name, probe in self.probes.items():
            scores = probe.scores(expected.rows[probe.site].float().numpy())
            found = np.array(payload["probes"][name]["scores"]).reshape(scores.shape)
            np.testing.assert_allclose(found, scores, rtol=1e-7)
