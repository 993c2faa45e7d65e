"""NCCL's P2P rules executed for real on CPU, so that a job hangs here as it would there.

Each process runs the `RankMachine` of its rank and never hands P2P to gloo: what the
machines tell each other, and the payloads, travel on sockets of the emulator's own. So
an op waits for exactly what the rules say, and a peer that dies leaves its partners
waiting without an error, as on NCCL.

Sockets are one-way: what a rank says to a peer goes over the connection it opened, what
it hears over those it accepted. That needs no agreement on who connects, and a process
that ends with nothing unread loses nothing it has sent.

Payloads are raw memory, as NCCL moves it: no dtype, no shape, no strides, and the
smaller of the two sizes.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pptrace.records import (
    NONE,
    Direction,
    Group,
    Transport,
    format_ranks,
    parse_ranks,
)
from pptrace.semantics import (
    Blocked,
    Communicator,
    Host,
    Kernel,
    KernelOp,
    KernelState,
    Law,
    Message,
    MessageKind,
    RankMachine,
)

__all__ = ["EmulatedOp", "EmulatedWork", "Emulator", "EmulatorState"]

logger = logging.getLogger("pptrace")

_HEADER = struct.Struct("<BIIQQ")  # kind, bytes of the two texts, number, payload bytes
_HELLO = struct.Struct("<16sI")  # the listener's token, the connecting rank
_READ_BYTES = 1 << 16
_JOIN_BYTES = 1 << 14  # up to here a copy is cheaper than a second buffer in sendmsg
_RETRY_S = (0.001, 0.05)  # first and longest pause between looks for a peer's address
_JOIN_S = 1.0


@dataclass(slots=True)
class EmulatedOp:
    """One op to post: ``peer`` is a global rank, ``k`` the caller's own count of it."""

    direction: Direction
    tensor: torch.Tensor
    peer: int
    k: int = NONE


@dataclass(frozen=True, slots=True)
class EmulatorState:
    """What one rank's emulator is doing.

    A job is quiescent, so hung for ever, if every host thread is blocked or has ended
    and, over all ranks, as many messages were received as sent; seen twice, with the
    same counts, the second time begun after the first had ended on all ranks.
    """

    hosts_blocked: int
    """Host threads held inside a call or a wait."""
    sent: int
    received: int


class EmulatedWork(dist.Work):
    """The work of an emulated kernel: one op, a coalesced batch, or a collective."""

    def __init__(
        self, emulator: Emulator, kernel: Kernel, tensors: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._emulator = emulator
        self._kernel = kernel
        self._tensors = tensors
        self._unsent = 0  # payloads not yet with the operating system
        self._done = False
        self._future: Any = None
        self._real: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the kernel is done; under ``host="async"``, return at once.

        Raises torch's DistBackendError if ``timeout`` passes. There is no other.
        """
        self._emulator._wait(self, timeout)
        return bool(self._real.wait()) if self._real is not None else True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the kernel is done."""
        return self._done and (self._real is None or bool(self._real.is_completed()))

    def is_success(self) -> bool:
        """Whether the kernel is done: an error leaves the call, never the work."""
        return self.is_completed()

    def exception(self) -> None:
        """None: see `is_success`."""

    def result(self) -> list[torch.Tensor]:
        """The tensors of the ops."""
        return list(self._real.result() if self._real is not None else self._tensors)

    def get_future(self) -> Any:
        """A future with the tensors, complete when the kernel is."""
        if self._real is not None:
            return self._real.get_future()
        return self._emulator._future_of(self)

    def carry(self, real: dist.Work) -> EmulatedWork:
        """Let this collective's work also stand for gloo's ``real`` one."""
        self._real = real
        return self


class Emulator:
    """The NCCL rules for this process, as one rank of a job.

    ``open_store`` opens a connection of its own to a store all ranks share; ``run``
    tells apart jobs that share one. ``host`` says what ``wait()`` does: ``blocking``
    as gloo, ``async`` as CUDA, where the host goes on before the data is there.
    ``address`` is where this rank listens: loopback serves ranks on one host.
    """

    def __init__(
        self,
        open_store: Callable[[], Any],
        rank: int,
        world_size: int,
        *,
        run: str = "",
        host: Host | str = Host.BLOCKING,
        address: str = "127.0.0.1",
        _without: Law = Law.NONE,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = Host(host)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waits: list[Callable[[], bool]] = []  # one per host thread held
        self._error = ""
        self._is_closed = False
        self._works: dict[Kernel, EmulatedWork] = {}
        self._completed: list[EmulatedWork] = []  # their futures are still to be set
        self._communicators: dict[tuple[Any, ...], Communicator] = {}
        self._machine = RankMachine(rank, self, host=self.host, _without=_without)
        self._fabric = _Fabric(self, open_store(), f"pptrace/emulation/{run}", address)
        self._fabric.start()
        atexit.register(self.close)

    # -- the host's side -----------------------------------------------------------

    @staticmethod
    def op(
        direction: Direction | int, tensor: torch.Tensor, peer: int, k: int = NONE
    ) -> EmulatedOp:
        """An op for `post`; ``k`` is kept for the caller, the emulator counts too."""
        return EmulatedOp(Direction(direction), tensor, peer, k)

    def post(
        self,
        group: Group,
        transport: Transport | int,
        ops: list[EmulatedOp],
        coalesced: bool,
    ) -> list[EmulatedWork]:
        """Issue ops: the call blocks while set-up does, then returns their works.

        A coalesced batch is one call with one work. Other ops are issued one by one.
        Raises DistBackendError where NCCL's call would fail.
        """
        transport = Transport(transport)
        if not coalesced:
            return [self._post(group, transport, [op], coalesced=False) for op in ops]
        return [self._post(group, transport, ops, coalesced=True)]

    def enter_collective(self, group: Group, name: str = "") -> EmulatedWork:
        """Issue a collective of ``group``; call it before gloo's own is issued.

        Blocks while the group's communicator is not set up. The work returned is done
        when the collective's turn has come on every rank, in the order of this
        communicator; `EmulatedWork.carry` ties gloo's to it. P2P posted later on the
        communicator waits for it in any case.
        """
        communicator = self._communicator(group, Transport.GROUP, NONE)
        kernel = Kernel(communicator, collective=name)
        return self._call(EmulatedWork(self, kernel, []))

    def state(self) -> EmulatorState:
        """What this rank is doing now; cheap."""
        with self._lock:
            # A wait that is over has been woken: its thread just has not run yet.
            blocked = sum(not is_over() for is_over in self._waits)
            return EmulatorState(blocked, self._fabric.sent, self._fabric.received)

    def blocked_on(self) -> tuple[Blocked, ...]:
        """Everything of this rank that cannot go on now, and what it waits for."""
        with self._lock:
            return self._machine.blocked_on()

    def close(self) -> None:
        """End the thread and the sockets; nothing pending is waited for.

        A host thread still blocked gets a DistBackendError.
        """
        if os.getpid() != self._pid:
            return  # a forked child: the lock may be held for ever, nothing is its own
        atexit.unregister(self.close)
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._error = "the emulator was closed"
            self._changed.notify_all()
        self._fabric.stop()

    def _post(
        self, group: Group, transport: Transport, ops: list[EmulatedOp], coalesced: bool
    ) -> EmulatedWork:
        communicator = self._communicator(group, transport, ops[0].peer)
        kernel = Kernel(
            communicator, tuple(_kernel_op(op) for op in ops), coalesced=coalesced
        )
        return self._call(EmulatedWork(self, kernel, [op.tensor for op in ops]))

    def _communicator(
        self, group: Group, transport: Transport, peer: int
    ) -> Communicator:
        key = (group.key, transport, peer if transport is Transport.PAIR else NONE)
        found = self._communicators.get(key)
        if found is None:
            found = Communicator.of(group, transport, self.rank, peer)
            self._communicators[key] = found
        return found

    def _call(self, work: EmulatedWork) -> EmulatedWork:
        kernel = work._kernel
        with self._locked():
            self._works[kernel] = work
            try:
                has_returned = self._machine.enter(kernel)
            except ValueError:
                del self._works[kernel]
                raise
            if not has_returned:
                self._block(lambda: kernel.has_returned, None)
        if kernel.state is KernelState.FAILED:
            raise dist.DistBackendError(
                f"NCCL error (emulated) on {kernel.communicator.label}: {kernel.error}:"
                " the peer sends and receives in one batch what this rank does not"
            )
        return work

    def _wait(self, work: EmulatedWork, timeout: timedelta | None) -> None:
        if work._done:
            return
        with self._locked():
            on_host = work._real is not None  # gloo's collective is already under way
            may_go = self._machine.wait(work._kernel, on_host=on_host)
            if may_go and self.host is Host.ASYNC:
                return
            if not self._block(lambda: work._done, timeout):
                raise dist.DistBackendError(
                    f"wait timed out after {timeout} on "
                    f"{work._kernel.communicator.label}"
                )

    def _block(self, is_over: Callable[[], bool], timeout: timedelta | None) -> bool:
        """Block this host thread, lock held; returns False if the time has passed."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        self._waits.append(is_over)
        try:
            while not is_over():
                if self._error:
                    raise dist.DistBackendError(f"emulate=nccl: {self._error}")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        finally:
            self._waits.remove(is_over)
        return True

    def _future_of(self, work: EmulatedWork) -> Any:
        with self._locked():
            if work._future is None:
                work._future = torch.futures.Future()
                if work._done:
                    self._completed.append(work)
            return work._future

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, then set futures without it: their callbacks are foreign."""
        completed: list[EmulatedWork] = []
        try:
            with self._lock:
                try:
                    yield
                finally:
                    if self._completed:
                        completed, self._completed = self._completed, completed
        finally:
            for work in completed:
                if work._future is not None:
                    work._future.set_result(work._tensors)

    # -- the peers' side -----------------------------------------------------------

    def _deliver(self, message: Message) -> None:
        with self._locked():
            self._machine.receive(message)

    def _target(self, message: Message) -> KernelOp | None:
        with self._lock:
            return self._machine.target(message)

    def _fail(self, error: str) -> None:
        """Give up: every host thread that is or gets blocked raises this."""
        with self._lock:
            if not self._error:
                self._error = error
                logger.warning("pptrace: emulate=nccl: %s", error)
            self._changed.notify_all()

    # -- the machine's port; the lock is held --------------------------------------

    def send(self, peer: int, message: Message, op: KernelOp | None) -> None:
        """Pass a message on (see `pptrace.semantics.Port`)."""
        work = None
        if op is not None and op.kernel is not None:
            work = self._works[op.kernel]
            work._unsent += 1
        self._fabric.send(peer, message, op, work)

    def returned(self, kernel: Kernel) -> None:
        """The call may return."""
        if kernel.state is KernelState.FAILED:
            del self._works[kernel]
        self._wake()

    def matched(self, op: KernelOp) -> None:
        """Nothing to do for a single op: the host waits on its kernel."""

    def done(self, kernel: Kernel) -> None:
        """The kernel is done; so is its work, once its payloads are on their way."""
        work = self._works[kernel]
        if not work._unsent:
            self._complete(work)

    def computed(self, rank: int, label: str) -> None:
        """Nothing to do: the host computes for itself."""

    def _payload_sent(self, work: EmulatedWork) -> None:
        work._unsent -= 1
        if not work._unsent and work._kernel.state is KernelState.DONE:
            self._complete(work)

    def _complete(self, work: EmulatedWork) -> None:
        del self._works[work._kernel]
        for op in work._kernel.ops:
            op.payload = None
        work._done = True
        self._completed.append(work)
        self._wake()

    def _wake(self) -> None:
        if self._waits:
            self._changed.notify_all()


def _kernel_op(op: EmulatedOp) -> KernelOp:
    memory = _memory_of(op.tensor)
    payload = (memory, op.tensor)  # the memory is the tensor's: keep both
    return KernelOp(op.direction, op.peer, len(memory), payload=payload)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes NCCL would move: ``numel`` elements from the tensor's first.

    Of a dense tensor these are its elements in storage order, whatever its strides.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(
            f"emulate=nccl moves dense CPU tensors, not {tensor.layout} on "
            f"{tensor.device}"
        )
    size = tensor.element_size()
    left = tensor.untyped_storage().nbytes() - tensor.storage_offset() * size
    nbytes = int(max(0, min(tensor.numel() * size, left)))  # expanded: owns fewer
    if not nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


# -- sockets -----------------------------------------------------------------------


class _Outgoing:
    """The connection this rank opens to a peer, and what still has to go over it."""

    __slots__ = ("frames", "is_connected", "is_lost", "peer", "socket", "wants_room")

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.socket: socket.socket | None = None
        self.is_connected = False
        self.is_lost = False
        self.wants_room = False
        # Bytes to send, and the work whose payload ends with them.
        self.frames: deque[tuple[memoryview, EmulatedWork | None]] = deque()


class _Incoming:
    """A connection accepted from a peer, and the frame being read from it."""

    __slots__ = ("buffer", "left", "message", "peer", "sink", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.peer = NONE
        self.buffer = bytearray()
        self.message: Message | None = None  # DATA whose payload is being read
        self.left = 0  # bytes of it to come
        self.sink: tuple[memoryview, Any] | None = None  # where they go, if anywhere


class _Fabric:
    """The sockets of one rank and the thread that serves them.

    `send` may be called by any thread that holds the emulator's lock, and sends what
    the socket takes at once: waiting for the thread would cost a switch per message.
    """

    def __init__(
        self, emulator: Emulator, store: Any, prefix: str, address: str
    ) -> None:
        self.sent = 0
        self.received = 0
        self._emulator = emulator
        self._store = store  # used by the constructor, then by the thread alone
        self._prefix = prefix
        self._token = secrets.token_bytes(16)
        self._outgoing: dict[int, _Outgoing] = {}
        self._todo: deque[_Outgoing] = deque()  # for the thread: connect, or wait
        self._texts: dict[Communicator, bytes] = {}
        self._communicators: dict[bytes, Communicator] = {}
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakened = socket.socketpair()
        self._listener = socket.create_server((address, 0), backlog=128)
        self._is_stopping = False
        for ours in (self._waker, self._wakened, self._listener):
            ours.setblocking(False)
        self._publish()
        self._thread = threading.Thread(
            target=self._serve, name="pptrace-emulation", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._wake_thread()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def send(
        self,
        peer: int,
        message: Message,
        op: KernelOp | None,
        work: EmulatedWork | None,
    ) -> None:
        outgoing = self._outgoing.get(peer)
        if outgoing is None:
            outgoing = self._outgoing[peer] = _Outgoing(peer)
            self._give_thread(outgoing)
        self.sent += 1
        if outgoing.is_lost:
            return
        frames = self._frames(message, op)
        idle = outgoing.is_connected and not outgoing.frames
        outgoing.frames.extend((frame, None) for frame in frames[:-1])
        outgoing.frames.append((frames[-1], work))
        if idle:
            self._flush(outgoing)

    # -- bytes ---------------------------------------------------------------------

    def _frames(self, message: Message, op: KernelOp | None) -> list[memoryview]:
        communicator = message.communicator
        text = self._texts.get(communicator)
        if text is None:
            text = self._texts[communicator] = _to_text(communicator)
        name = message.name.encode()
        memory = memoryview(b"")
        if op is not None and isinstance(op.payload, tuple):
            memory = op.payload[0]
        head = _HEADER.pack(
            message.kind, len(text), len(name), message.number, len(memory)
        )
        head += text + name
        if len(memory) <= _JOIN_BYTES:
            return [memoryview(head + memory)]
        return [memoryview(head), memory]

    def _flush(self, outgoing: _Outgoing) -> None:
        """Send what the socket takes; lock held."""
        frames = outgoing.frames
        assert outgoing.socket is not None
        try:
            while frames:
                buffers = [frame for frame, _ in frames][:8]
                self._took(frames, outgoing.socket.sendmsg(buffers))
        except BlockingIOError:
            if not outgoing.wants_room:
                outgoing.wants_room = True
                self._give_thread(outgoing)
        except OSError:
            self._lose(outgoing)

    def _took(
        self, frames: deque[tuple[memoryview, EmulatedWork | None]], count: int
    ) -> None:
        while frames and count >= len(frames[0][0]):
            frame, work = frames.popleft()
            count -= len(frame)
            if work is not None:
                self._emulator._payload_sent(work)
        if count:
            frame, work = frames[0]
            frames[0] = (frame[count:], work)

    def _lose(self, outgoing: _Outgoing) -> None:
        """The peer is gone: as on NCCL, its partners notice nothing but silence."""
        outgoing.is_lost = True
        outgoing.frames.clear()
        if not outgoing.wants_room:
            outgoing.wants_room = True
            self._give_thread(outgoing)

    # -- the thread ----------------------------------------------------------------

    def _give_thread(self, outgoing: _Outgoing) -> None:
        self._todo.append(outgoing)
        if threading.current_thread() is not self._thread:
            self._wake_thread()

    def _wake_thread(self) -> None:
        with suppress(OSError):  # full: it is awake anyway
            self._waker.send(b"\0")

    def _serve(self) -> None:
        selector = self._selector
        selector.register(self._wakened, selectors.EVENT_READ, None)
        selector.register(self._listener, selectors.EVENT_READ, None)
        unknown: list[_Outgoing] = []
        pause = _RETRY_S[0]
        try:
            while not self._is_stopping:
                self._take_todo(unknown)
                if unknown:
                    found = [out for out in unknown if self._connect(out)]
                    unknown = [out for out in unknown if out not in found]
                    pause = _RETRY_S[0] if found else min(2 * pause, _RETRY_S[1])
                if self._todo:
                    continue
                for key, events in selector.select(pause if unknown else None):
                    self._handle(key.fileobj, key.data, events)
        except Exception as error:  # must not end in silence
            if not self._is_stopping:
                logger.warning("pptrace: emulation ends", exc_info=error)
                self._emulator._fail(f"its thread ended: {error}")
        finally:
            self._close_all()

    def _take_todo(self, unknown: list[_Outgoing]) -> None:
        while self._todo:
            outgoing = self._todo.popleft()
            if outgoing.socket is None:
                unknown.append(outgoing)
            elif outgoing.is_lost:
                self._forget(outgoing)
            elif outgoing.is_connected:
                self._selector.register(
                    outgoing.socket, selectors.EVENT_WRITE, outgoing
                )

    def _handle(self, ours: Any, data: Any, events: int) -> None:
        if isinstance(data, _Outgoing):
            self._on_room(data)
        elif isinstance(data, _Incoming):
            self._on_bytes(data)
        elif ours is self._listener:
            self._accept()
        elif events:
            with suppress(BlockingIOError):
                while self._wakened.recv(_READ_BYTES):
                    pass

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            with suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        for outgoing in list(self._outgoing.values()):
            if outgoing.socket is not None:
                outgoing.socket.close()
        self._waker.close()

    # -- connecting ----------------------------------------------------------------

    def _publish(self) -> None:
        address, port = self._listener.getsockname()[:2]
        value = {
            "address": address,
            "port": port,
            "token": self._token.hex(),
            "host": socket.gethostname(),
        }
        self._store.set(f"{self._prefix}/{self._emulator.rank}", json.dumps(value))

    def _connect(self, outgoing: _Outgoing) -> bool:
        """Begin to connect, if the peer has published where; returns whether it has."""
        key = f"{self._prefix}/{outgoing.peer}"
        try:
            if not self._store.check([key]):
                return False
            found = json.loads(self._store.get(key))
        except Exception as error:  # noqa: BLE001 - torch raises many kinds
            # The store went with its rank: what needs it waits for ever, as on NCCL.
            logger.debug("pptrace: no address of rank %d: %s", outgoing.peer, error)
            return False
        here = socket.gethostname()
        if found["host"] != here and found["address"].startswith("127."):
            self._emulator._fail(
                f"rank {outgoing.peer} runs on host {found['host']}, this one on {here}"
                "; emulation listens on loopback, for ranks of one host"
            )
            return True
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _HELLO.pack(bytes.fromhex(found["token"]), self._emulator.rank)
        with self._emulator._lock:
            outgoing.socket = connection
            outgoing.frames.appendleft((memoryview(hello), None))
            code = connection.connect_ex((found["address"], found["port"]))
            if code not in {0, errno.EINPROGRESS}:
                self._lose(outgoing)
                return True
            outgoing.wants_room = True
        self._selector.register(connection, selectors.EVENT_WRITE, outgoing)
        return True

    def _on_room(self, outgoing: _Outgoing) -> None:
        """A socket is connected, or takes bytes again."""
        connection = outgoing.socket
        assert connection is not None
        with self._emulator._locked():
            self._selector.unregister(connection)
            outgoing.wants_room = False
            if not outgoing.is_connected:
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._lose(outgoing)
                    return
                outgoing.is_connected = True
            self._flush(outgoing)

    def _forget(self, outgoing: _Outgoing) -> None:
        assert outgoing.socket is not None
        with suppress(KeyError, ValueError):
            self._selector.unregister(outgoing.socket)
        outgoing.socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                incoming = _Incoming(connection)
                self._selector.register(connection, selectors.EVENT_READ, incoming)

    # -- reading -------------------------------------------------------------------

    def _on_bytes(self, incoming: _Incoming) -> None:
        try:
            count = self._read(incoming)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # the peer died, or is none of ours
            count = 0
        if not count:
            self._selector.unregister(incoming.socket)
            incoming.socket.close()

    def _read(self, incoming: _Incoming) -> int:
        """Read once; returns the number of bytes, 0 at the end."""
        if incoming.left and not incoming.buffer and incoming.sink is not None:
            # The rest of a large payload goes to where it belongs without a copy.
            memory, tensor = incoming.sink
            if memory:
                wanted = min(incoming.left, len(memory))
                count = incoming.socket.recv_into(memory, wanted)
                incoming.sink = (memory[count:], tensor)
                self._got_payload(incoming, count)
                return count
        chunk = incoming.socket.recv(_READ_BYTES)
        incoming.buffer += chunk
        while self._parse(incoming):
            pass
        return len(chunk)

    def _parse(self, incoming: _Incoming) -> bool:
        """Take one piece off the buffer; returns whether there was a whole one."""
        buffer = incoming.buffer
        if incoming.left:
            if not buffer:
                return False
            piece = bytes(buffer[: incoming.left])
            if incoming.sink is not None:
                memory, tensor = incoming.sink
                kept = min(len(piece), len(memory))
                memory[:kept] = piece[:kept]
                incoming.sink = (memory[kept:], tensor)
            del buffer[: len(piece)]
            self._got_payload(incoming, len(piece))
            return True
        if incoming.peer == NONE:
            return self._parse_hello(incoming)
        if len(buffer) < _HEADER.size:
            return False
        kind, text_size, name_size, number, nbytes = _HEADER.unpack_from(buffer)
        start, middle = _HEADER.size, _HEADER.size + text_size
        end = middle + name_size
        if len(buffer) < end:
            return False
        message = Message(
            MessageKind(kind),
            self._communicator(bytes(buffer[start:middle])),
            incoming.peer,
            number,
            nbytes,
            buffer[middle:end].decode(),
        )
        del buffer[:end]
        self._got_header(incoming, message)
        return True

    def _parse_hello(self, incoming: _Incoming) -> bool:
        if len(incoming.buffer) < _HELLO.size:
            return False
        token, peer = _HELLO.unpack_from(incoming.buffer)
        if not hmac.compare_digest(token, self._token):
            raise ValueError("a stranger")
        incoming.peer = peer
        del incoming.buffer[: _HELLO.size]
        return True

    def _got_header(self, incoming: _Incoming, message: Message) -> None:
        if message.kind is not MessageKind.DATA or not message.nbytes:
            self._deliver(message)
            return
        op = self._emulator._target(message)
        incoming.message = message
        incoming.left = message.nbytes
        payload = op.payload if op is not None else None
        incoming.sink = payload if isinstance(payload, tuple) else None

    def _got_payload(self, incoming: _Incoming, count: int) -> None:
        incoming.left -= count
        message = incoming.message
        if not incoming.left and message is not None:
            incoming.message = incoming.sink = None
            self._deliver(message)

    def _deliver(self, message: Message) -> None:
        self._emulator._deliver(message)
        self.received += 1

    def _communicator(self, text: bytes) -> Communicator:
        found = self._communicators.get(text)
        if found is None:
            found = self._communicators[text] = _from_text(text)
        return found


def _to_text(communicator: Communicator) -> bytes:
    name, ranks = communicator.group
    members = format_ranks(communicator.members)
    value = [name, format_ranks(ranks), int(communicator.transport), members]
    return json.dumps([*value, communicator.eager]).encode()


def _from_text(text: bytes) -> Communicator:
    name, ranks, transport, members, eager = json.loads(text)
    group = (name, parse_ranks(ranks))
    return Communicator(group, Transport(transport), parse_ranks(members), eager)
