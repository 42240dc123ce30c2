"""A step of a simulated pendulum cart with contacts: `mjx.step`, as MuJoCo's page on MJX calls it."""

import mujoco
from mujoco import mjx

XML = """
<mujoco>
  <worldbody>
    <light name="top" pos="0 0 1"/>
    <geom type="plane" size="1 1 .1"/>
    <body name="box_and_sphere" pos="0 0 .25" euler="0 0 -30">
      <joint name="swing" type="hinge" axis="1 -1 0" pos="-.2 -.2 -.2"/>
      <geom name="red_box" type="box" size=".1 .1 .1" rgba="1 0 0 1"/>
    </body>
    <body pos="0 0 1">
      <joint type="free"/>
      <geom name="green_sphere" size=".1" rgba="0 1 0 1"/>
    </body>
  </worldbody>
</mujoco>
"""


def arguments():
    mj_model = mujoco.MjModel.from_xml_string(XML)
    mjx_model = mjx.put_model(mj_model)
    return mjx_model, mjx.make_data(mjx_model)


def avals():
    return arguments()
