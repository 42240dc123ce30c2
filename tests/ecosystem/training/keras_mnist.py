"""A Keras model, trained as the guide "Writing a training loop from scratch in JAX" does it."""

import jax
import keras
from keras import layers

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((16, 16, 1)),
        layers.Conv2D(8, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.GlobalAveragePooling2D(),
        layers.Dropout(0.2),
        layers.Dense(10),
    ]
)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(learning_rate=1e-3)
optimizer.build(model.trainable_variables)
metric = keras.metrics.SparseCategoricalAccuracy()


def compute_loss_and_updates(trainable_variables, non_trainable_variables, metric_variables, x, y):
    y_pred, non_trainable_variables = model.stateless_call(
        trainable_variables, non_trainable_variables, x, training=True
    )
    loss = loss_fn(y, y_pred)
    metric_variables = metric.stateless_update_state(metric_variables, y, y_pred)
    return loss, (non_trainable_variables, metric_variables)


grad_fn = jax.value_and_grad(compute_loss_and_updates, has_aux=True)


def train_step(state, data):
    trainable_variables, non_trainable_variables, optimizer_variables, metric_variables = state
    x, y = data
    (loss, (non_trainable_variables, metric_variables)), grads = grad_fn(
        trainable_variables, non_trainable_variables, metric_variables, x, y
    )
    trainable_variables, optimizer_variables = optimizer.stateless_apply(
        optimizer_variables, grads, trainable_variables
    )
    return loss, (trainable_variables, non_trainable_variables, optimizer_variables, metric_variables)


def arguments():
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
        metric.variables,
    )
    state = tuple([variable.value for variable in group] for group in variables)
    return state, (jax.random.normal(jax.random.key(1), (8, 16, 16, 1)), jax.numpy.arange(8))


def avals():
    return jax.eval_shape(arguments)
