"""Train and evaluate the digits classifier from its bundle, in a process that cannot import jax."""

import importlib.util
import sys
import time

started = time.perf_counter()

import numpy as np  # noqa: E402  (the clock starts before the imports)

import stagec  # noqa: E402

EPOCHS = 30
BUCKETS = (64, 8, 1)


def main(path: str) -> None:
    """Load the bundle at `path`, train, evaluate, and print what happened."""
    if importlib.util.find_spec("jax") is not None:
        sys.exit("jax is importable here: this demonstration is about running without it")
    bundle = stagec.load(path)
    state = bundle["init"](np.uint32(0))
    first_result = time.perf_counter() - started

    print(f"bundle      {bundle.name} {bundle.version}, running its target {bundle.target!r}; jax is not importable")
    for name, function in bundle.items():
        for description in function.descriptions:
            bucket = ", ".join(f"{dim} = {size}" for dim, size in description.bucket.items())
            size = f"{description.executable_bytes / 1024:.0f} KiB"
            flops = description.analysis["flops"]
            count = f"{flops:,.0f}" if isinstance(flops, int | float) else flops
            print(f"  {name:<11} {bucket:<11} {size:>7}  {count:>11} flops")
    print(f"start       first result after {1000 * first_result:.0f} ms (import numpy and jaxlib, load, run init)")

    train, test = digits()
    state, loss, seconds, steps = fit(bundle["train_step"], stagec.device_put(state), *train)
    print(f"training    {steps} steps in {seconds:.2f} s, last loss {loss:.4f}")

    params = to_numpy(state["params"])
    right, calls = evaluate(bundle["predict"], params, *test)
    used = ", ".join(f"{count} x batch {size}" for size, count in calls.items() if count)
    print(f"evaluation  {len(test[0])} held-out digits in {sum(calls.values())} calls ({used})")
    accuracy = right / len(test[0])
    print(f"accuracy    {accuracy:.4f}")
    if accuracy <= 0.95:
        sys.exit("accuracy is not over 0.95")


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return (images, labels) to train on and to test on: 1,436 and 361 of scikit-learn's handwritten digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.data))
    images = (data.data[order] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    return (images[:1436], labels[:1436]), (images[1436:], labels[1436:])


def fit(step: stagec.Function, state: dict, images: np.ndarray, labels: np.ndarray) -> tuple[dict, float, float, int]:
    """Train for EPOCHS epochs in batches of 32; the state is donated at every step and stays on the device."""
    rng = np.random.default_rng(1)
    begin, steps, loss = time.perf_counter(), 0, 0.0
    for _ in range(EPOCHS):
        for batch in np.split(rng.permutation(len(images))[: len(images) // 32 * 32], len(images) // 32):
            before = state
            state, loss = step(state, images[batch], labels[batch])
            steps += 1
    assert before["params"]["output"]["b"].is_deleted(), "the state was not donated"
    return state, float(loss), time.perf_counter() - begin, steps


def evaluate(predict: stagec.Function, params: dict, images: np.ndarray, labels: np.ndarray) -> tuple[int, dict]:
    """Return how many digits are right, and how often each bucket was called."""
    right, calls, at = 0, dict.fromkeys(BUCKETS, 0), 0
    while at < len(images):
        size = next(size for size in BUCKETS if size <= len(images) - at)
        result = predict(params, images[at : at + size])
        right += int(np.sum(result["digit"] == labels[at : at + size]))
        calls[size] += 1
        at += size
    return right, calls


def to_numpy(tree: dict) -> dict:
    """Return the tree with its device arrays as numpy arrays."""
    return {key: to_numpy(value) if isinstance(value, dict) else value.numpy() for key, value in tree.items()}


if __name__ == "__main__":
    main(sys.argv[1])
