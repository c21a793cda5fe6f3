"""The types of values in JSON and YAML files that somebody else can have written."""

import reprlib
import sys
import types
from typing import Any, Literal, NotRequired, Union, get_args, get_origin

# What a JSON object has at least: its keys, and the annotation of each value, for example `list[str]`,
# `NotRequired[float | None]` or other Types. A tuple is a list of these values.
Types = dict[str, Any]
LARGEST = 2**63  # a larger whole number is no count, and no time in nanoseconds
NAMES_OF_TYPES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    types.NoneType: "null",
}


def wrong_type(content: Any, expected: Types) -> str:
    """Which key of an object is missing or has a value of another type than expected, and what was expected; "" if none."""
    if not isinstance(content, dict):
        return f"{shorten(content)} is no object"
    for key, kind in expected.items():
        if get_origin(kind) is NotRequired:
            if key not in content:
                continue
            (kind,) = get_args(kind)
        if key not in content:
            return f"{key} is missing, expected {name_of_type(kind)}"
        if isinstance(kind, dict) and isinstance(content[key], dict):
            if wrong := wrong_type(content[key], kind):
                return f"{key}: {wrong}"
        elif not has_type(content[key], kind):
            return f"{key} is {shorten(content[key])}, expected {name_of_type(kind)}"
    return ""


def has_type(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of a type in Types. True and False are no numbers; a float may be written without a point."""
    kinds = get_args(kind)
    if get_origin(kind) in (types.UnionType, Union):
        return any(has_type(value, one) for one in kinds)
    if get_origin(kind) is tuple:
        return type(value) is list and len(value) == len(kinds) and all(map(has_type, value, kinds))
    if get_origin(kind) is list:
        return type(value) is list and all(has_type(item, kinds[0]) for item in value)
    if get_origin(kind) is dict:
        return type(value) is dict and all(has_type(item, kinds[1]) for item in value.values())
    if isinstance(kind, dict):
        return not wrong_type(value, kind)
    if get_origin(kind) is Literal:
        return value in kinds and type(value) in map(type, kinds)
    if type(value) is int and kind in (int, float):
        return abs(value) < (LARGEST if kind is int else sys.float_info.max)
    return kind is Any or type(value) is kind


def name_of_type(kind: Any) -> str:
    """A type of Types in words."""
    kinds = get_args(kind)
    if get_origin(kind) in (types.UnionType, Union):
        return " or ".join(dict.fromkeys(map(name_of_type, kinds)))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, kinds))
    if get_origin(kind) is tuple:
        return f"a list of {', '.join(map(name_of_type, kinds))}"
    if kinds and kinds[-1] is not Any:
        return f"{NAMES_OF_TYPES[get_origin(kind)]}, in it {name_of_type(kinds[-1])}"
    if isinstance(kind, dict):
        return "an object with " + ", ".join(kind)
    return NAMES_OF_TYPES.get(get_origin(kind) or kind, "a text")  # of classes only enumerations, which have names


def shorten(value: Any) -> str:
    """A value of JSON or YAML for a message. What is deeply nested is not written out: aliases in a YAML can make it endless."""
    shortener = reprlib.Repr()
    shortener.maxlevel, shortener.maxstring, shortener.maxother, shortener.maxlong = 3, 100, 100, 30
    return shortener.repr(value)[:200]
