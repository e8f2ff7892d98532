"""Commands that an engine does not take at once."""

import asyncio

import pytest

from realtime.command_queue import CommandQueue
from realtime.errors import EngineError
from realtime.pingpong.messages import CloseSlot, Command, EndTurn, SlotRef

SLOT = SlotRef(0, 1)
COMMANDS = [EndTurn(SLOT, turn_id, 0) for turn_id in range(4)]


class Engine:
    """Takes as many commands as it has room for, and then says why not."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.code = "engine_overloaded"
        self.taken: list[Command] = []
        self.failed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self.queue = CommandQueue(self.submit, self.failed.set_result)

    def submit(self, command: Command) -> None:
        if len(self.taken) >= self.room and not isinstance(command, CloseSlot):
            raise EngineError(self.code, "no")
        self.taken.append(command)


async def test_what_is_not_taken_comes_later_and_in_order() -> None:
    engine = Engine(room=1)
    for command in COMMANDS:
        engine.queue.put(command)
    waiting = asyncio.create_task(engine.queue.wait_until_empty())
    await asyncio.sleep(0)
    assert engine.taken == COMMANDS[:1] and not waiting.done()
    engine.room = len(COMMANDS)
    await asyncio.wait_for(waiting, 5.0)
    assert engine.taken == COMMANDS


async def test_a_close_goes_first_and_nothing_that_waited_follows() -> None:
    engine = Engine(room=1)
    for command in COMMANDS:
        engine.queue.put(command)
    engine.queue.put(CloseSlot(SLOT))
    engine.room = len(COMMANDS) + 1
    assert engine.taken == [COMMANDS[0], CloseSlot(SLOT)]
    await asyncio.wait_for(engine.queue.wait_until_empty(), 5.0)
    assert engine.taken == [COMMANDS[0], CloseSlot(SLOT)]


async def test_an_engine_that_is_gone_is_told_of_once() -> None:
    engine = Engine(room=0)
    for command in COMMANDS:
        engine.queue.put(command)
    engine.code = "engine_stopped"
    assert (await asyncio.wait_for(engine.failed, 5.0)).code == "engine_stopped"
    await asyncio.wait_for(engine.queue.wait_until_empty(), 5.0)
    with pytest.raises(EngineError, match="no"):
        engine.queue.put(COMMANDS[0])
    engine.room = len(COMMANDS)
    engine.queue.put(COMMANDS[3])
    assert engine.taken == COMMANDS[3:], "what waited is discarded"
