"""The persistent connection of executors and driver: handshake, frames, the driver's server, the executors' link.

One WebSocket per host, one MessagePack message per binary frame. `wire.proof` decides who may speak; the messages are
those of `phalanx.run.messages`, with the few of this room around them (`wire.message_frames`).
"""
