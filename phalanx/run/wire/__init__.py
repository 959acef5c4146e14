"""The persistent connection of executors and driver: handshake, frames, the driver's server, the executors' link.

One WebSocket per host, one MessagePack message per binary frame. Who may speak is settled by `wire.proof`; what is said
is in `phalanx.run.messages`, with the few words of this room around it (`wire.codec`).
"""
