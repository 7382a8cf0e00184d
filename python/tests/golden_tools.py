"""Tools whose descriptions by `transformers.utils.get_json_schema` are in golden_tools.json."""
from typing import Any, Dict, List, Literal, Optional, Union


def plain(a: int, b: float = 1.0, text: str = "x", flag: bool = False):
    """Does something.

    It does more than that.

    Args:
        a: The first.
        b: The second,
            over two lines.
        text: A text.
        flag: A flag.

    Returns:
        A result.
    """


def nested(items: List[int], table: Dict[str, float], maybe: Optional[str] = None, either: Union[int, str] = 1):
    """Takes containers.

    Args:
        items: Numbers.
        table: Numbers by name.
        maybe: Perhaps a text.
        either: One or the other.
    """


def chosen(mode: Literal["fast", "slow"], unit: str):
    """Chooses.

    Args:
        mode: How.
        unit: The unit. (choices: ["cm", "kg"])
    """


def loose(anything: Any, things: list, deep: List[List[str]]):
    """Takes anything.

    Args:
        anything: Any value.
        things: Several.
        deep: Lists of lists.
    """


def nothing():
    """Takes nothing."""
