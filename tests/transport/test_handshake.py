from __future__ import annotations

import pytest

from aexec.transport.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    Caller,
    Stranger,
    answer_challenge,
    challenge,
    check_proof,
    hello,
    read_hello,
)

OURS, THEIRS = b"o" * 32, b"t" * 32


def talk(worker_secret, driver_secret):
    said = hello(3, "control")
    answer = challenge(driver_secret, said)
    return said, answer, answer_challenge(worker_secret, said, answer)


def test_two_who_know_the_secret_believe_each_other():
    """All messages have their fixed size, for neither end reads more than that of anybody."""
    said, answer, proof = talk(OURS, OURS)
    check_proof(OURS, said, answer, proof)
    assert read_hello(said) == Caller(3, "control")
    assert (len(said), len(answer), len(proof)) == (HELLO_SIZE, CHALLENGE_SIZE, PROOF_SIZE)


def test_a_worker_proves_nothing_to_a_driver_of_another_group():
    """It is the driver that has to prove itself first: whoever has taken its address learns nothing."""
    with pytest.raises(Stranger, match="does not know the secret"):
        talk(OURS, THEIRS)


def test_a_worker_of_another_group_is_not_believed():
    """Whatever it makes of the challenge."""
    said = hello(0, "work")
    answer = challenge(OURS, said)
    for proof in (b"\0" * PROOF_SIZE, answer[-PROOF_SIZE:], talk(OURS, OURS)[2]):
        with pytest.raises(Stranger, match="does not know the secret"):
            check_proof(OURS, said, answer, proof)


def test_what_was_overheard_is_of_no_use():
    """A proof holds for one hello and one challenge only."""
    said, answer, proof = talk(OURS, OURS)
    with pytest.raises(Stranger, match="secret"):
        check_proof(OURS, said, challenge(OURS, said), proof)
    with pytest.raises(Stranger, match="secret"):
        check_proof(OURS, hello(3, "control"), answer, proof)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(HELLO_SIZE), "which is no hello"),
        (bytes(HELLO_SIZE), "which is no hello"),
        (hello(0, "work")[:10] + b"\xff\xff" + hello(0, "work")[12:], "which is no hello"),
        (hello(0, "work")[:8] + b"\x02\0" + hello(0, "work")[10:], "version 2 of the handshake"),
    ],
)
def test_what_is_no_hello_is_told_apart(data, why):
    """A browser, noise, and another version of ours."""
    with pytest.raises(Stranger, match=why):
        read_hello(data)
