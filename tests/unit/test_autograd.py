"""The engine: gradients of graphs, what it keeps alive, and its errors; with Functions made here, so that only it is
tested."""

import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from flcuda import functional as F
from flcuda.autograd import Function, GradTarget, Tensor, no_grad
from flcuda.errors import FlcudaError
from flcuda.parameters import Parameter


class Multiply(Function):
    def forward(self, a, b):
        self.a, self.b = a, b
        return a * b

    def backward(self, grad):
        return (grad * self.b if self.needs_grad[0] else None, grad * self.a if self.needs_grad[1] else None)


class Sine(Function):
    def forward(self, x):
        self.x = x
        return np.sin(x)

    def backward(self, grad):
        return (grad * np.cos(self.x),)


def leaf(rng: np.random.Generator, *shape: int) -> Tensor:
    return Tensor(rng.standard_normal(shape), requires_grad=True)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Memory must go by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_graph_with_joins_and_forks(rng):
    a, b = leaf(rng, 3, 4), leaf(rng, 3, 4)
    s = Sine.apply(a)
    y = F.add(Multiply.apply(s, b), Multiply.apply(s, s))
    y = F.add(y, Multiply.apply(a, y))
    g = rng.standard_normal((3, 4))
    y.backward(g)
    sine, cosine = np.sin(a.data), np.cos(a.data)
    inner = sine * b.data + sine**2
    d_inner = g * (1 + a.data)
    np.testing.assert_allclose(a.grad, d_inner * (b.data + 2 * sine) * cosine + g * inner, rtol=1e-13)
    np.testing.assert_allclose(b.grad, d_inner * sine, rtol=1e-13)


def test_gradients_add_up_over_backwards_and_never_in_place(rng):
    a, b = leaf(rng, 5), leaf(rng, 5)
    g = rng.standard_normal(5)
    kept = g.copy()
    F.add(a, b).backward(g)  # both leaves and the caller hold one array now
    first = b.grad
    Multiply.apply(a, a).backward(g)
    np.testing.assert_array_equal(g, kept)
    np.testing.assert_array_equal(first, kept)
    assert b.grad is first
    np.testing.assert_allclose(a.grad, kept + 2 * a.data * kept, rtol=1e-14)


def test_backward_from_a_leaf(rng):
    a = leaf(rng, 2)
    a.backward(np.array([1.0, 2.0]))
    a.backward(np.array([1.0, 2.0]))
    np.testing.assert_array_equal(a.grad, [2.0, 4.0])


def test_one_element_needs_no_gradient(rng):
    a = leaf(rng)
    Sine.apply(a).backward()
    np.testing.assert_allclose(a.grad, np.cos(a.data))
    assert a.grad.shape == ()


def test_only_what_is_asked(rng):
    asked = []

    class Spy(Multiply):
        def backward(self, grad):
            asked.append(self.needs_grad)
            return super().backward(grad)

    a, b = leaf(rng, 2), Tensor(rng.standard_normal(2))
    Spy.apply(a, b).backward(np.ones(2))
    assert asked == [(True, False)]
    assert b.grad is None


def test_no_grad_records_nothing_in_this_thread_only(rng):
    a = leaf(rng, 2)
    seen = {}

    def other() -> None:
        seen["other"] = Sine.apply(a).requires_grad

    with no_grad():
        assert not Sine.apply(a).requires_grad
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with no_grad():
            pass
        assert not Sine.apply(a).requires_grad
    assert Sine.apply(a).requires_grad
    assert seen == {"other": True}


def test_no_grad_ends_with_an_exception(rng):
    with pytest.raises(ZeroDivisionError), no_grad():
        raise ZeroDivisionError
    assert Sine.apply(leaf(rng, 2)).requires_grad


def test_a_second_backward_is_an_error_and_changes_nothing(rng):
    a = leaf(rng, 2)
    s = Sine.apply(a)
    y = Sine.apply(s)
    y.backward(np.ones(2))
    kept = a.grad.copy()
    with pytest.raises(FlcudaError, match="Sine was freed by an earlier backward"):
        y.backward(np.ones(2))
    with pytest.raises(FlcudaError, match="freed"):  # a new end on an old graph
        Sine.apply(s).backward(np.ones(2))
    np.testing.assert_array_equal(a.grad, kept)


def test_a_deep_graph_needs_no_recursion(rng):
    a = leaf(rng, 1)
    y = a
    for _ in range(5_000):
        y = F.scale(y, -1.0)
    y.backward(np.ones(1))
    np.testing.assert_array_equal(a.grad, [1.0])
    y = a
    for _ in range(5_000):
        y = F.scale(y, -1.0)
    del y  # a graph that is thrown away unused


def test_saved_arrays_go_as_they_are_used(rng, no_collector):
    alive = []
    saved: list[weakref.ref] = []

    class Saver(Function):
        def forward(self, x):
            self.saved = x + 1
            saved.append(weakref.ref(self.saved))
            return x * 1

        def backward(self, grad):
            alive.append([reference() is not None for reference in saved])
            return (grad * 1,)

    y = leaf(rng, 4)
    for _ in range(4):
        y = Saver.apply(y)
    y.backward(np.ones(4))
    # When the first Function (the last in backward) runs, the saved arrays of all others are gone.
    assert alive == [[True] * (4 - i) + [False] * i for i in range(4)]
    assert [reference() for reference in saved] == [None] * 4


def test_an_activation_that_no_backward_needs_is_freed_at_once(rng, no_collector):
    a = leaf(rng, 4)
    middle = F.add(a, a)
    reference = weakref.ref(middle.data)
    y = F.add(middle, a)
    del middle
    assert reference() is None
    y.backward(np.ones(4))
    np.testing.assert_array_equal(a.grad, 3 * np.ones(4))


def test_an_unused_graph_is_freed_without_the_collector(rng, no_collector):
    y = Sine.apply(Sine.apply(leaf(rng, 4)))
    node = weakref.ref(y._node)
    del y
    assert node() is None


class Written(Function):
    """x * p, whose backward writes p's gradient where it is told to."""

    def forward(self, x, p):
        self.x, self.p = x, p
        return x * p

    def backward(self, grad):
        target = self.targets[1]
        if target is None:
            return None, grad * self.x
        assert isinstance(target, GradTarget)
        target.array[...] = grad * self.x + (target.array if target.accumulate else 0)
        return None, target.array


class WrittenTwice(Written):
    """x * p * q with p and q the same leaf or not."""

    def forward(self, x, p, q):
        self.q = q
        return super().forward(x * 1, p) * q

    def backward(self, grad):
        assert self.targets[2] is None or self.targets[1] is not self.targets[2]
        other = grad * self.x * self.p
        _, dp = super().backward(grad * self.q)
        return None, dp, other


def test_a_parameter_is_written_in_place_and_added_to(rng):
    p = Parameter(rng.standard_normal(3), "float64", device="cpu")
    x = [rng.standard_normal(3) for _ in range(3)]
    y = F.add(Written.apply(Tensor(x[0]), p), Written.apply(Tensor(x[1]), p))
    y.backward(np.ones(3))
    assert p.grad is p.buffer
    np.testing.assert_allclose(p.grad, x[0] + x[1], rtol=1e-14)
    Written.apply(Tensor(x[2]), p).backward(np.ones(3))
    np.testing.assert_allclose(p.grad, x[0] + x[1] + x[2], rtol=1e-14)
    buffer = p.grad
    p.grad = None
    buffer[...] = np.nan  # what is left from the last step does not count
    Written.apply(Tensor(x[2]), p).backward(np.ones(3))
    np.testing.assert_array_equal(p.grad, x[2])


def test_one_parameter_twice_in_one_function(rng):
    p = Parameter(rng.standard_normal(3), "float64", device="cpu")
    x = rng.standard_normal(3)
    WrittenTwice.apply(Tensor(x), p, p).backward(np.ones(3))
    np.testing.assert_allclose(p.grad, 2 * x * p.data, rtol=1e-14)


def test_a_parameter_takes_gradients_that_are_not_written_in_place(rng):
    p = Parameter(rng.standard_normal(3), "float64", device="cpu")
    g = rng.standard_normal(3)
    F.add(p, p).backward(g)
    np.testing.assert_allclose(p.grad, 2 * g, rtol=1e-15)
    assert p.grad is p.buffer
    assert p.grad is not g


def test_bad_arguments(rng):
    a = leaf(rng, 2, 3)
    y = Sine.apply(a)
    with pytest.raises(ValueError, match=r"grad: is needed.*\(2, 3\)"):
        y.backward()
    with pytest.raises(ValueError, match=r"grad: shape \(3,\)"):
        y.backward(np.ones(3))
    with pytest.raises(TypeError, match="grad: float32"):
        y.backward(np.ones((2, 3), np.float32))
    with pytest.raises(FlcudaError, match="does not depend"):
        Tensor(np.ones(2)).backward(np.ones(2))
    with pytest.raises(TypeError, match=r"requires_grad.*int64"):
        Tensor(np.arange(3), requires_grad=True)
    with pytest.raises(TypeError, match="data: "):
        Tensor([1.0, 2.0])
    y.backward(np.ones((2, 3)))  # none of it used the graph up


def test_what_a_tensor_tells(rng):
    a = leaf(rng, 2, 3)
    assert (a.shape, a.ndim, a.dtype, str(a.device)) == ((2, 3), 2, np.float64, "cpu")
    assert repr(a) == "Tensor(shape=(2, 3), float64, cpu, requires_grad=True)"
    assert "made by Sine" in repr(Sine.apply(a))
    one = Tensor(np.array([1.5], np.float32))
    assert float(one) == one.item() == 1.5
    assert a.numpy() is a.data


def test_operators(rng):
    a, b = leaf(rng, 3), leaf(rng, 3)
    y = -(a + b) * 2.0 - 3 * a + b / 4
    y.backward(np.ones(3))
    np.testing.assert_allclose(y.data, -2 * (a.data + b.data) - 3 * a.data + b.data / 4, rtol=1e-14)
    np.testing.assert_array_equal(a.grad, np.full(3, -5.0))
    np.testing.assert_array_equal(b.grad, np.full(3, -1.75))
    with pytest.raises(TypeError):
        a + 1.0


def test_a_gradient_lives_no_longer_than_it_is_needed(rng, no_collector):
    """Where two gradients were added, both are gone while the Function before works with their sum."""
    made: list[weakref.ref] = []
    alive = []

    class Maker(Function):
        def forward(self, x):
            return x * 1

        def backward(self, grad):
            alive.append(sum(reference() is not None for reference in made))
            result = grad * 1
            made.append(weakref.ref(result))
            return (result,)

    y = Maker.apply(leaf(rng, 4))
    F.add(Maker.apply(y), Maker.apply(y)).backward(np.ones(4))
    assert alive == [0, 1, 0]


def test_no_leaf_shares_its_gradient(rng):
    a, b = leaf(rng, 4), leaf(rng, 4)
    given = np.ones(4)
    F.add(a, b).backward(given)
    a.grad *= 0.5
    np.testing.assert_array_equal(b.grad, 1.0)
    np.testing.assert_array_equal(given, 1.0)
    a.grad = None
    a.backward(given)
    assert a.grad is not given
