"""Simulate eight double pendulums with MJX, pushed at random."""

import jax
import jax.numpy as jnp
import mujoco
from mujoco import mjx

PENDULUM = """
<mujoco>
  <option timestep="0.01" iterations="2" ls_iterations="4"/>
  <worldbody>
    <geom type="plane" size="2 2 .1"/>
    <body pos="0 0 1">
      <joint type="hinge" axis="0 1 0"/>
      <geom type="capsule" size=".05" fromto="0 0 0 0 0 -.5" mass="1"/>
      <body pos="0 0 -.5">
        <joint name="elbow" type="hinge" axis="0 1 0"/>
        <geom type="sphere" size=".1" mass="1"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="elbow" gear="2"/></actuator>
</mujoco>
"""

model = mjx.put_model(mujoco.MjModel.from_xml_string(PENDULUM))


@jax.vmap
def reset(key):
    return mjx.make_data(model).replace(qpos=jax.random.uniform(key, (model.nq,), minval=-1, maxval=1))


@jax.jit
def step(data, control):
    return jax.vmap(lambda data, control: mjx.step(model, data.replace(ctrl=control)))(data, control)


data = reset(jax.random.split(jax.random.key(0), 8))
height = []
for number in range(4):
    control = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (8, model.nu))
    data = step(data, control)
    height.append(data.xpos[:, -1, 2].mean())
print("height", float(jnp.stack(height).mean()), data.qpos.shape)
