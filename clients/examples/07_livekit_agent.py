"""A LiveKit agent that speaks with Plosive.

Add `stt=`, `llm=` and `vad=` for one that listens. Needs a LiveKit server (LIVEKIT_URL and its
keys), a Plosive server, `plosive serve`, and `pip install -e ".[livekit]"`.

    python clients/examples/07_livekit_agent.py dev
"""

import os
import sys

try:
    from livekit.agents import Agent, AgentServer, AgentSession, JobContext, cli

    from clients.adapters.livekit import TTS
except ModuleNotFoundError:
    sys.exit('LiveKit is not installed; in a clone of Plosive: pip install -e ".[livekit]"')

server = AgentServer()


def make_session(url: str) -> AgentSession:
    tts = TTS(url=url)
    tts.prewarm()  # the voice is prefilled before the first word
    return AgentSession(tts=tts, use_tts_aligned_transcript=True)


async def greet(session: AgentSession) -> None:
    await session.say("Hello! You may interrupt me at any time.")
    await session.say("How can I help you?")


@server.rtc_session()
async def entrypoint(ctx: JobContext) -> None:
    session = make_session(os.environ.get("PLOSIVE_URL", "http://localhost:8765"))
    await session.start(Agent(instructions="You are a friendly assistant."), room=ctx.room)
    await greet(session)


if __name__ == "__main__":
    cli.run_app(server)
