// The list of voices, and a new one from a file or the microphone.

import { request } from "/page/api.js";

const MAX_CLIP_S = 30;

export async function fillVoices(select, chosen = null) {
  const { default: defaultVoice, voices } = await request("/v1/voices");
  const options = voices.map(({ name, is_builtin: isBuiltin }) => {
    const isChosen = name === (chosen ?? defaultVoice);
    return new Option(isBuiltin ? name : `${name} (added)`, name, isChosen, isChosen);
  });
  select.replaceChildren(...options);
}

export class VoiceForm {
  // `ui` holds the form's elements by id; `onAdded(name)` is called when the server has the voice.
  constructor(ui, onAdded) {
    this.ui = ui;
    this.onAdded = onAdded;
    this.recording = null; // a Blob
    this.recorder = null;
    ui.record.onclick = () => (this.recorder ? this.recorder.stop() : this.record());
    ui.clip.onchange = () => this.forgetRecording();
    ui.addVoice.onsubmit = (event) => {
      event.preventDefault();
      this.submit();
    };
  }

  async record() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch {
      this.say("The microphone cannot be used: allow it for this page, or choose a file instead.");
      return;
    }
    const parts = [];
    const startedMs = performance.now();
    const seconds = () => (performance.now() - startedMs) / 1000;
    const tick = setInterval(() => {
      this.ui.record.textContent = `Stop (${Math.floor(seconds())} s)`;
      if (seconds() > MAX_CLIP_S - 1) this.recorder?.stop();
    }, 250);
    this.recorder = new MediaRecorder(stream);
    this.recorder.ondataavailable = ({ data }) => parts.push(data);
    this.recorder.onstop = () => {
      clearInterval(tick);
      for (const track of stream.getTracks()) track.stop();
      this.recording = new Blob(parts, { type: this.recorder.mimeType });
      this.recorder = null;
      this.ui.clip.value = "";
      this.ui.record.textContent = "Record again";
      this.say(`Recorded ${seconds().toFixed(1)} seconds. Add the voice, or record again.`);
    };
    this.recorder.start();
    this.ui.record.textContent = "Stop (0 s)";
    this.say("Recording. Read your words aloud, then press Stop.");
  }

  forgetRecording() {
    this.recording = null;
    this.ui.record.textContent = "Record";
    this.say("");
  }

  async submit() {
    const clip = this.recording ?? this.ui.clip.files[0];
    if (!clip) {
      this.say("Record a clip or choose a file first.");
      return;
    }
    const form = new FormData();
    const name = this.ui.voiceName.value.trim();
    form.append("name", name);
    form.append("text", this.ui.voiceText.value);
    form.append("file", clip, "clip");
    this.say("The clip is being read.");
    try {
      await request("/v1/voices", { method: "POST", body: form });
      await this.onAdded(name);
      this.ui.addVoice.reset();
      this.forgetRecording();
      this.say(`The voice “${name}” has been added and is chosen.`);
    } catch (error) {
      this.say(error.message);
    }
  }

  say(text) {
    this.ui.voiceState.textContent = text;
  }
}
