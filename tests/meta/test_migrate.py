"""docs/migrate_from_fsdp2.md: each row names a test that exists."""

from tests.meta.source import ROOT
from tests.meta.tables import missing_tests, named_tests, table_rows

PAGE = ROOT / "docs" / "migrate_from_fsdp2.md"


def test_every_row_has_a_call_what_takes_its_place_and_a_test_that_exists():
    rows = list(table_rows(PAGE.read_text()))
    assert len(rows) > 20
    for cells in rows:
        assert len(cells) == 4, cells
        assert cells[0], cells
        assert cells[1], cells
        assert named_tests(cells[3], cells[0]), cells
        assert missing_tests(cells[3], cells[0]) == []
