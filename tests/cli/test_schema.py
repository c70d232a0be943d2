"""`tlora schema`."""

import json

from tlora.config import json_schema


def test_the_schema_is_printed_as_json(tlora_command, capsys) -> None:
    """Ready to be redirected into a file."""
    assert tlora_command("schema") == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
