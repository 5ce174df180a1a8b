"""Saved reports of every suite."""

from __future__ import annotations

import json

from fusednorm.bench.devices.rows import DEVICES_SUITE, DeviceReport
from fusednorm.bench.forms.rows import FORMS_SUITE, FormReport
from fusednorm.bench.models.rows import MODELS, ModelReport
from fusednorm.bench.results import Report

AnyReport = Report | ModelReport | FormReport | DeviceReport
_KINDS: dict[str, type[ModelReport | FormReport | DeviceReport]] = {
    MODELS: ModelReport,
    FORMS_SUITE: FormReport,
    DEVICES_SUITE: DeviceReport,
}


def read_report(text: str) -> AnyReport:
    """A report of any suite; ValueError where the text is none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None  # from_json says what is wrong
    suite = data.get("suite") if isinstance(data, dict) else None
    return _KINDS.get(suite, Report).from_json(text) if isinstance(suite, str) else Report.from_json(text)
