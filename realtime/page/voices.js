// The list of voices, a new one from a file or the microphone, and the end of one.

import { request, sentence } from "/page/api.js";

const MAX_CLIP_S = 30;

export async function fillVoices(select, chosen = null) {
  const { default: defaultVoice, voices } = await request("/v1/voices");
  const options = voices.map(({ name, is_builtin: isBuiltin }) => {
    const isChosen = name === (chosen ?? defaultVoice);
    const option = new Option(isBuiltin ? name : `${name} (added)`, name, isChosen, isChosen);
    option.dataset.isAdded = isBuiltin ? "" : "yes";
    return option;
  });
  select.replaceChildren(...options);
  select.dispatchEvent(new Event("filled"));
}

// The button that deletes the chosen voice, where it is an added one; it is pressed twice.
export class VoiceDeleter {
  // `onDeleted()` is called when the server has forgotten the voice.
  constructor(ui, onDeleted, complain) {
    this.ui = ui;
    this.onDeleted = onDeleted;
    this.complain = complain;
    this.toDelete = null; // the name, once it was asked for
    ui.deleteVoice.onclick = () => this.press();
    ui.deleteVoice.onblur = () => this.offer();
    ui.voice.addEventListener("change", () => this.offer());
    ui.voice.addEventListener("filled", () => this.offer());
  }

  offer() {
    const option = this.ui.voice.selectedOptions[0];
    this.toDelete = null;
    this.ui.deleteVoice.hidden = !option?.dataset.isAdded;
    this.ui.deleteVoice.textContent = "Delete";
  }

  async press() {
    const name = this.ui.voice.value;
    if (this.toDelete !== name) {
      this.toDelete = name;
      this.ui.deleteVoice.textContent = "Delete for good";
      this.ui.announcer.textContent = `Press again to delete the voice “${name}” for good.`;
      return;
    }
    try {
      await request(`/v1/voices/${encodeURIComponent(name)}`, { method: "DELETE" });
    } catch (error) {
      this.offer();
      this.complain(error.message);
      return;
    }
    this.ui.voice.focus(); // the button goes
    await this.onDeleted(null);
    this.ui.announcer.textContent = `The voice “${name}” has been deleted.`;
  }
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
      const { warnings } = await request("/v1/voices", { method: "POST", body: form });
      await this.onAdded(name);
      this.ui.addVoice.reset();
      this.forgetRecording();
      const added = `The voice “${name}” has been added and is chosen.`;
      this.say([added, ...warnings.map(sentence)].join(" "));
    } catch (error) {
      this.say(error.message);
    }
  }

  say(text) {
    this.ui.voiceState.textContent = text;
  }
}
